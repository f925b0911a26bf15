"""The keys of Qwen3's models with experts: only those that every sparse model has. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from titan_hydra.core.job.config.family import Linear, decoder_flops, decoder_linears
from titan_hydra.core.models.sparse import SparseModel, active_parameters, shared_linears, sparse_parameters


@dataclass
class Qwen3MoeConfig(SparseModel):
    qk_norm: ClassVar[bool] = True


def parameters(config: Qwen3MoeConfig) -> int:
    """Return the number of parameters, with the norms of attention's heads."""
    attention = 2 * config.dim * config.head_width * (config.n_heads + config.n_kv_heads) + 2 * config.head_width
    return sparse_parameters(config, attention)


def flops(config: Qwen3MoeConfig, seq_len: int, parameters: int) -> int:
    """Return the FLOPs of a token, forward and backward. Only the experts that the token uses count."""
    return decoder_flops(config, seq_len, active_parameters(config, parameters))


def linears(config: Qwen3MoeConfig) -> tuple[Linear, ...]:
    """Return the linears of a sparse block in running order, without router and routed experts."""
    return *decoder_linears(config)[:4], *shared_linears(config)
