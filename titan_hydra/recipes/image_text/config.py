"""The keys of a decoder with a vision tower before it, and of the objective. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from titan_hydra.core.job.config.family import Linear, Stack, decoder_modules
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.ranges import COUNT, WIDTH, Interval
from titan_hydra.core.job.config.schema import Objective
from titan_hydra.core.models.llama3.config import Llama3Config
from titan_hydra.core.models.qwen3.config import Qwen3Config


@dataclass
class Vision:
    dim: int = key(768, "width of the tower", WIDTH)
    n_layers: int = key(12, "number of blocks of the tower", COUNT)
    n_heads: int = key(12, "number of attention heads of the tower", WIDTH)
    ffn_dim: int = key(3072, "feed-forward width of the tower", WIDTH)
    patch: int = key(16, "side length of a patch in pixels; a patch becomes a token", Interval(1, 256))
    grid: int = key(
        16,
        "number of rows and of columns in the table of learned positions, which is interpolated to each image's size",
        Interval(1, 256),
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
    patches: int = key(
        1024, "capacity of a sample in image patches; tensors have this size even if there are fewer", COUNT
    )
    image_patches: int = key(
        256, "maximum number of patches of an image; a larger image is scaled down and keeps its aspect ratio", COUNT
    )


def modules_with_tower(config: Model) -> list[str]:
    """Return the decoder's modules in running order, with the tower after the embedding, whose output it changes."""
    embedding, *others = decoder_modules(config)
    return [embedding, "vision", *others]


def parameters_with_tower(decoder: Callable[[Any], int]) -> Callable[[Any], int]:
    """Turn a decoder's formula for its number of parameters into that of the decoder with a tower, whose terms have the
    names of the modules in model.Tower.
    """

    def parameters(config: Any) -> int:
        tower: Vision = config.vision
        patches, positions = (3 * tower.patch**2 + 1) * tower.dim, tower.grid**2 * tower.dim
        blocks, norm = tower.n_layers * parameters_of_block(tower), 2 * tower.dim
        inner, outer = (tower.dim + 1) * tower.ffn_dim, (tower.ffn_dim + 1) * config.dim
        return decoder(config) + patches + positions + blocks + norm + inner + outer

    return parameters


def parameters_of_block(tower: Vision) -> int:
    """Return the number of parameters of a block of the tower; attention's keys have no bias."""
    return 4 * tower.dim**2 + 3 * tower.dim + 2 * tower.dim * tower.ffn_dim + tower.ffn_dim + tower.dim + 4 * tower.dim


def stacks_with_tower(job: Any) -> tuple[Stack, ...]:
    """Return the blocks of the tower, for predictions. For the backward, a block keeps inputs and outputs of both
    norms; queries, keys and values; attention's output; and the feed-forward before and after its activation.
    """
    tower: Vision = job.model.vision
    dim, width = tower.dim, tower.ffn_dim
    linears = (
        *(Linear(name, dim, dim, column=name != "wo") for name in ("wq", "wk", "wv", "wo")),
        Linear("w1", dim, width),
    )
    linears += (Linear("w2", width, dim, column=False),)
    own = {
        "dim": dim,
        "n_layers": tower.n_layers,
        "n_heads": tower.n_heads,
        "n_kv_heads": tower.n_heads,
        "head_dim": dim // tower.n_heads,
    }
    own |= {"ffn_dim": width}
    return (
        Stack(
            depth=tower.n_layers,
            linears=linears,
            parameters=parameters_of_block(tower),
            kept=8 * dim + 2 * width,
            again=0,
            backward=3 * dim + width,
            tower=own,
            tokens=job.objective.patches,
        ),
    )
