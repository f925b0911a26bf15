"""The keys of Qwen3: only those that every family has. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from titan_hydra.core.job.config.family import decoder_parameters
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.ranges import WIDTH


@dataclass
class Qwen3Config(Model):
    ffn_dim: int = key(..., "width of the feed-forward", WIDTH)
    qk_norm: ClassVar[bool] = True


def parameters(config: Qwen3Config) -> int:
    """Return the number of parameters: that of a plain decoder, plus two norms of a head's width in each block."""
    return decoder_parameters(config) + config.n_layers * 2 * config.head_width
