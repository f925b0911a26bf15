"""The keys of a vision tower, beside those of the decoder that it stands before, and of the objective. Imports no torch."""

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
    n_layers: int = key(12, "blocks of the tower", COUNT)
    n_heads: int = key(12, "heads of its attention", WIDTH)
    ffn_dim: int = key(3072, "width of its feed-forward", WIDTH)
    patch: int = key(16, "pixels of a patch's side; a patch becomes a token", Interval(1, 256))
    grid: int = key(
        16, "rows and columns of the learned positions, which are interpolated to the rows and columns of each image", Interval(1, 256)
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
    patches: int = key(1024, "image patches that a sample has room for; tensors have this size, however many there are", COUNT)
    image_patches: int = key(256, "an image with more patches is scaled down to this number; its aspect ratio stays", COUNT)


def modules_with_tower(config: Model) -> list[str]:
    """Return the decoder's modules in running order, with the tower behind the embedding, into which it writes."""
    embedding, *others = decoder_modules(config)
    return [embedding, "vision", *others]
