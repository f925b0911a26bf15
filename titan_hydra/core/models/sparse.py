"""The keys of models with experts, and the numbers that follow from them: all parameters, the parameters that a token
uses, FLOPs. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from titan_hydra.core.job.config.family import Linear, decoder_linears
from titan_hydra.core.job.config.fault import Fault, divisors
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.ranges import NATURAL, NOT_NEGATIVE, POSITIVE, WIDTH, Interval
from titan_hydra.core.job.config.schema import key

EXPERTS = Interval(1, 2**16)


@dataclass
class SparseModel(Model):
    widths: ClassVar[tuple[str, ...]] = (*Model.widths, "expert_dim")
    float32_router: ClassVar[bool] = False  # whether the router's matmul is in float32, as the published model has it
    n_experts: int = key(..., "number of routed experts of a sparse block", EXPERTS)
    experts_per_token: int = key(..., "number of routed experts that each token uses", EXPERTS)
    expert_dim: int = key(..., "width of an expert's feed-forward", WIDTH)
    n_shared_experts: int = key(
        0, "number of experts that every token uses, computed as one feed-forward of their total width", NATURAL
    )
    first_k_dense_replace: int = key(0, "number of first blocks whose feed-forward is dense", NATURAL)
    router: str = key("softmax", "function that turns the router's logits into scores", choices=("softmax", "sigmoid"))
    norm_topk_prob: bool = key(True, "divide the scores of a token's experts by their sum")
    routed_scaling_factor: float = key(1.0, "multiplies the scores of a token's experts", POSITIVE)
    n_group: int = key(
        1, "number of groups of experts; a token uses only experts of the `topk_group` best groups", EXPERTS
    )
    topk_group: int = key(1, "number of groups whose experts a token may use", EXPERTS)
    router_bias_update_rate: float = key(
        0.0,
        "amount by which an expert's bias, used only to choose experts, changes after each training step: up if "
        "the expert had fewer tokens than the mean, else down (arXiv 2408.15664); 0: no bias",
        NOT_NEGATIVE,
    )
    sequence_balance: float = key(
        0.0, "weight of the balance loss within a sequence (arXiv 2412.19437, section 2.1.2); 0: none", NOT_NEGATIVE
    )

    @property
    def blocks(self) -> int:
        """The number of blocks, with those that predict further tokens."""
        return self.n_layers + self.predictions - 1

    @property
    def sparse(self) -> bool:
        return True

    @property
    def expert_count(self) -> int:
        return self.n_experts

    def arithmetic(self) -> dict[str, Any]:
        return super().arithmetic() | {"router_bias_update_rate": None, "sequence_balance": None}

    def faults(self) -> Iterator[Fault]:
        """A token uses some of the experts, all in the groups that it may use. At least one block has experts."""
        if self.n_experts % self.n_group:
            yield Fault(
                "model.n_group",
                self.n_group,
                f"{self.n_experts} experts cannot be divided by it",
                legal=divisors(self.n_experts),
            )
            return
        if self.topk_group > self.n_group:
            yield Fault("model.topk_group", self.topk_group, f"there are {self.n_group} groups", (self.n_group,))
            return
        usable = self.n_experts // self.n_group * self.topk_group
        if self.experts_per_token > usable:
            yield Fault(
                "model.experts_per_token", self.experts_per_token, f"a token may use {usable} experts", legal=(usable,)
            )
        if self.first_k_dense_replace >= self.n_layers:
            yield Fault(
                "model.first_k_dense_replace",
                self.first_k_dense_replace,
                f"leaves none of {self.n_layers} blocks to the experts",
                legal=(self.n_layers - 1,),
            )


def expert_parameters(config: SparseModel) -> int:
    """Return the number of parameters of all routed experts of the model."""
    return (config.blocks - config.first_k_dense_replace) * config.n_experts * 3 * config.dim * config.expert_dim


def sparse_parameters(config: SparseModel, attention: int) -> int:
    """Return the number of parameters of a model with experts: embedding and head, feed-forwards (dense ones, routers,
    shared and routed experts), `attention` of each block, norms.
    """
    sparse, dim = config.blocks - config.first_k_dense_replace, config.dim
    ends = config.vocab_size * dim * (1 if config.tie_embeddings else 2)
    shared = 3 * dim * config.expert_dim * config.n_shared_experts
    dense = config.first_k_dense_replace * 3 * dim * config.ffn_width
    feed_forwards = dense + sparse * (config.n_experts * dim + shared) + expert_parameters(config)
    return ends + feed_forwards + config.blocks * (attention + 2 * dim) + dim


def shared_linears(config: SparseModel) -> tuple[Linear, ...]:
    """Return the linears of a sparse block's shared experts; none without them."""
    width = config.expert_dim * config.n_shared_experts
    return decoder_linears(config, width)[4:] if width else ()


def active_parameters(config: SparseModel, parameters: int) -> int:
    """Return the number of parameters that are active for a token, out of all `parameters` of the model."""
    return parameters - round(expert_parameters(config) * (1 - config.experts_per_token / config.n_experts))
