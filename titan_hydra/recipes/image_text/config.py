"""The keys of a decoder with a vision tower before it, and of the objective. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from titan_hydra.config.family import decoder_modules
from titan_hydra.config.fault import Fault
from titan_hydra.config.field import key
from titan_hydra.config.model import Model
from titan_hydra.config.ranges import COUNT, WIDTH, Interval
from titan_hydra.config.schema import Objective
from titan_hydra.models.llama3.config import Llama3Config
from titan_hydra.models.qwen3.config import Qwen3Config


@dataclass
class Vision:
    dim: int = key(768, "width of the tower", WIDTH)
    n_layers: int = key(12, "number of blocks of the tower", COUNT)
    n_heads: int = key(12, "number of attention heads of the tower", WIDTH)
    ffn_dim: int = key(3072, "feed-forward width of the tower", WIDTH)
    patch: int = key(16, "side length of a patch in pixels; a patch becomes a token", Interval(1, 256))
    grid: int = key(
        16, "number of rows and of columns in the table of learned positions, which is interpolated to each image's size", Interval(1, 256)
    )

    def faults(self) -> Iterator[Fault]:
        """Heads share the width of the tower evenly."""
        if self.dim % self.n_heads:
            yield Fault("model.vision.n_heads", self.n_heads, f"model.vision.dim={self.dim} cannot be split over them")


@dataclass
class KeysWithVision:
    vision: Vision = key(Vision, "the tower that reads images")

    def faults(self) -> Iterator[Fault]:
        yield from super().faults()  # type: ignore[misc]  # the decoder's
        yield from self.vision.faults()


@dataclass
class Llama3VisionConfig(KeysWithVision, Llama3Config):
    pass


@dataclass
class Qwen3VisionConfig(KeysWithVision, Qwen3Config):
    pass


@dataclass
class IllustratedText(Objective):
    patches: int = key(1024, "capacity of a sample in image patches; tensors have this size even if there are fewer", COUNT)
    image_patches: int = key(256, "maximum number of patches of an image; a larger image is scaled down and keeps its aspect ratio", COUNT)


def modules_with_tower(config: Model) -> list[str]:
    """Return the decoder's modules in running order, with the tower after the embedding, whose output it changes."""
    embedding, *others = decoder_modules(config)
    return [embedding, "vision", *others]
