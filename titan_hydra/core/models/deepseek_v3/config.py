"""The keys of DeepSeek-V3 in addition to those of every sparse model: latent attention and YaRN. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from titan_hydra.core.job.config.family import Linear
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.ranges import COUNT, NATURAL, NOT_NEGATIVE, POSITIVE, WIDTH, Interval
from titan_hydra.core.models.sparse import SparseModel, active_parameters, shared_linears, sparse_parameters


@dataclass
class Yarn:
    factor: float = key(1.0, "divisor of the low frequencies (YaRN, arXiv 2309.00071); 1 disables YaRN", Interval(1))
    beta_fast: float = key(
        32.0, "a frequency that makes more rotations than this over original_max_seq_len is not scaled", POSITIVE
    )
    beta_slow: float = key(
        1.0,
        "a frequency that makes fewer rotations than this over original_max_seq_len is divided by `factor`",
        POSITIVE,
    )
    temperature: float = key(
        1.0, "attention's logits are multiplied by (1 + 0.1 * temperature * ln(factor)) squared", NOT_NEGATIVE
    )
    original_max_seq_len: int = key(4096, "sequence length of pre-training, before YaRN", COUNT)


@dataclass
class DeepSeekV3Config(SparseModel):
    widths: ClassVar[tuple[str, ...]] = (*SparseModel.widths, "q_lora_rank", "kv_lora_rank")
    float32_router: ClassVar[bool] = True
    q_lora_rank: int = key(
        0, "width of the latent from which queries are computed; 0: computed from the residual stream", NATURAL
    )
    kv_lora_rank: int = key(..., "width of the latent from which keys and values are computed", WIDTH)
    qk_nope_head_dim: int = key(..., "width of the part of a query and a key that is not rotated", WIDTH)
    qk_rope_head_dim: int = key(
        ..., "width of the part of a query that is rotated, and of the rotated key that all heads share", WIDTH
    )
    v_head_dim: int = key(..., "width of a head's value", WIDTH)
    mtp: int = key(
        0,
        "number of further tokens that are predicted at each place in training, each by a block of its own after the "
        "model's (multi-token prediction, arXiv 2412.19437, section 2.2)",
        Interval(0, 16),
        identity="if set",
    )
    mtp_weight: float = key(
        0.3,
        "weight of the mean loss of these predictions; DeepSeek-V3 had 0.3, and 0.1 at the end",
        NOT_NEGATIVE,
        identity="if set",
    )
    yarn: Yarn = key(Yarn, "YaRN: scales rotary frequencies for longer sequences than in pre-training")

    @property
    def predictions(self) -> int:  # type: ignore[override]
        """The number of predictions at each place in training."""
        return 1 + self.mtp

    @property
    def head_width(self) -> int:
        """The width of a query and of a key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def value_width(self) -> int:
        """The width of a head's value."""
        return self.v_head_dim

    def arithmetic(self) -> dict[str, Any]:
        only_in_training = {"mtp": None, "mtp_weight": None}
        return (
            super().arithmetic()
            | only_in_training
            | {"n_kv_heads": None, "yarn": self.yarn if self.yarn.factor != 1 else None}
        )

    def faults(self) -> Iterator[Fault]:
        """Every head has its own key, whose rotated part has an even width."""
        yield from super().faults()
        turned, value = self.qk_rope_head_dim, self.v_head_dim
        if turned % 2:
            yield Fault(
                "model.qk_rope_head_dim", turned, "must be even (RoPE rotates pairs)", legal=(turned - 1, turned + 1)
            )
        if self.n_kv_heads != self.n_heads:
            yield Fault(
                "model.n_kv_heads",
                self.n_kv_heads,
                "latent attention computes a key and a value for each head",
                legal=(self.n_heads,),
            )
        if self.head_dim is not None:
            reason = "qk_nope_head_dim, qk_rope_head_dim and v_head_dim are the widths of a head"
            yield Fault("model.head_dim", self.head_dim, reason, legal=(None,))
        if value > self.head_width:
            reason = "a value may not be wider than a query (qk_nope_head_dim + qk_rope_head_dim)"
            yield Fault("model.v_head_dim", value, reason, legal=(self.head_width,))
        if self.yarn.beta_slow >= self.yarn.beta_fast:
            yield Fault(
                "model.yarn.beta_slow",
                self.yarn.beta_slow,
                f"must be less than model.yarn.beta_fast={self.yarn.beta_fast}",
            )


def latent_clipped(config: DeepSeekV3Config) -> dict[str, tuple[tuple[int, float], ...]]:
    """Return what QK-clip scales (arXiv 2507.20534, algorithm 1): a head's own queries and keys by the square root of its
    factor, its rotated queries by the factor. The rotated key, which all heads share, is left as it is.
    """
    plain = config.qk_nope_head_dim
    queries = ((plain, 0.5), (config.qk_rope_head_dim, 1.0))
    return {"wq_b" if config.q_lora_rank else "wq": queries, "wkv_b": ((plain, 0.5), (config.v_head_dim, 0.0))}


def parameters(config: DeepSeekV3Config) -> int:
    """Return the number of parameters, with the norms of attention's latents."""
    queries, heads = config.n_heads * config.head_width, config.n_heads
    from_stream = config.dim * queries if not config.q_lora_rank else config.q_lora_rank * (config.dim + 1 + queries)
    latent = config.dim * (config.kv_lora_rank + config.qk_rope_head_dim) + config.kv_lora_rank
    of_heads = heads * (
        config.kv_lora_rank * (config.qk_nope_head_dim + config.v_head_dim) + config.v_head_dim * config.dim
    )
    return sparse_parameters(config, from_stream + latent + of_heads) + config.mtp * (2 * config.dim + 3) * config.dim


def flops(config: DeepSeekV3Config, seq_len: int, parameters: int) -> int:
    """Return the FLOPs of a token, forward and backward: 6 for each weight that multiplies the token, and those of the
    two matmuls of attention in each head.
    """
    lookups = 0 if config.tie_embeddings else config.vocab_size * config.dim
    heads = config.mtp * config.vocab_size * config.dim  # the head is multiplied again for each further prediction
    products = 6 * config.blocks * config.n_heads * (config.head_width + config.v_head_dim) * seq_len
    return 6 * (active_parameters(config, parameters) - lookups + heads) + products


def faults_of_further_predictions(job: Any) -> Iterator[Fault]:
    """What multi-token prediction cannot be combined with: its blocks need the embedding and the last block's output on
    one rank, and tokens further ahead, which only plain text has.
    """
    if not job.model.mtp:
        return
    whys = {
        f"parallelism.pp={job.parallelism.pp} has embedding and head on different ranks": job.parallelism.pp > 1,
        f"objective={job.objective.name} gives no tokens further ahead": job.objective.name != "language",
        f"loss={job.loss.name} weighs all predictions alike": job.loss.name != "cross_entropy",
        f"adapter={job.adapter.name} has no place in its blocks": job.adapter.name != "none",
        f"parametrization={job.parametrization.name} has no scales for its blocks": job.parametrization.name
        != "standard",
        f"fault_tolerance={job.fault_tolerance.name} knows only the model's blocks": job.fault_tolerance.name != "off",
        f"data.seq_len={job.data.seq_len} has no token so far ahead": job.data.seq_len <= job.model.mtp,
    }
    if why := next((why for why, holds in whys.items() if holds), None):
        yield Fault("model.mtp", job.model.mtp, why, legal=(0,))


def linears(config: DeepSeekV3Config) -> tuple[Linear, ...]:
    """Return the linears of a sparse block in running order, without router and routed experts. Latents are computed on
    every rank.
    """
    queries, dim = config.n_heads * config.head_width, config.dim
    first = (
        (Linear("wq_a", dim, config.q_lora_rank, whole=True), Linear("wq_b", config.q_lora_rank, queries))
        if config.q_lora_rank
        else (Linear("wq", dim, queries),)
    )
    return (
        *first,
        Linear("wkv_a", dim, config.kv_lora_rank + config.qk_rope_head_dim, whole=True),
        Linear("wkv_b", config.kv_lora_rank, config.n_heads * (config.qk_nope_head_dim + config.v_head_dim)),
        Linear("wo", config.n_heads * config.v_head_dim, dim, column=False),
        *shared_linears(config),
    )
