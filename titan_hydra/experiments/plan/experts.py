"""The numbers of weights, rows and bytes of a block's experts on one rank, if all experts get the same number of
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb

from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import SIZE
from titan_hydra.core.job.ranks import sparse


@dataclass(frozen=True)
class ExpertShape:
    """The sizes of a block's experts on one rank. A row is one token that is routed to one expert. `rows` is the number
    of rows that a rank's experts compute for each token of a context-parallel rank. `dim` and `width` are numbers of
    elements in a row: outside and inside an expert.
    """

    number: int  # routed experts of a block, on all ranks
    ep: int
    shards: int  # number of ranks over which FSDP shards the experts of an ep rank
    rows: float
    dim: int
    width: int
    used: int  # bytes of one element of an activation
    dense: int  # number of blocks at the model's beginning that have no experts
    sequence: int  # number of ranks over which the input tokens of a router are split
    chosen_experts: int  # experts of a token
    groups: int  # groups of experts; a token's experts are in `chosen_groups` of them
    chosen_groups: int
    in_turn: bool  # whether tokens get experts in turn, so that a token's experts have consecutive numbers

    def reached(self, parts: int) -> float:
        """Return over how many of `parts` equal parts of the experts a token's experts are spread: their expected
        number if each choice is equally likely within the limits of groups.
        """
        if self.in_turn:
            return max(self.chosen_experts * parts / self.number, 1)
        groups, chosen, choices = self.groups, self.chosen_groups, self.chosen_experts
        if parts > groups:  # a part is a fraction of one group
            within = (1 - groups / parts / chosen) ** choices
            missed = 1 - chosen / groups * (1 - within)
        else:  # a part has several groups, `found` of which are chosen
            groups_of_part = groups // parts
            missed = sum(
                comb(groups_of_part, groups_chosen)
                * comb(groups - groups_of_part, chosen - groups_chosen)
                / comb(groups, chosen)
                * (1 - groups_chosen / chosen) ** choices
                for groups_chosen in range(min(groups_of_part, chosen) + 1)
            )
        return parts * (1 - missed)

    @property
    def parameters(self) -> float:
        """The number of weights of a block's experts that an ep rank holds, before FSDP shards them."""
        return self.number / self.ep * 3 * self.dim * self.width

    @property
    def outputs(self) -> list[float]:
        """The elements per token in the outputs of the router and of the three grouped matmuls, in the order of
        computation.
        """
        return [self.number / self.sequence, self.rows * self.width, self.rows * self.width, self.rows * self.dim]

    @property
    def sent(self) -> float:
        """The bytes per token that are sent to the ranks of the token's experts. As many bytes come back as results."""
        return self.rows * self.dim * self.used * (self.ep > 1)

    @property
    def traffic(self) -> float:
        """The bytes of memory traffic per token outside matmuls: to permute and unpermute rows, to weight and sum them,
        and to apply the activation function.
        """
        return self.rows * self.used * ((5 + 4 * (self.ep > 1)) * self.dim + 5 * self.width)

    @property
    def everything(self) -> float:
        """The bytes per token that the forward keeps for the backward: the rows before and after the experts, four
        tensors as wide as an expert, the scores of all experts in float32, and the permutations.
        """
        orders = 16 * (1 + (self.ep > 1))
        return self.rows * (self.used * (2 * self.dim + 4 * self.width) + orders) + 12 * self.number / self.sequence

    def backward(self, again: bool) -> float:
        """Return how many bytes per token the peak of the backward needs in addition to `everything`. The peak is in
        the backward of the experts or, if the block is recomputed (`again`), at the place where rows are unpermuted.
        """
        return (
            self.rows * self.used * max(self.width, 2 * self.width - self.dim, again * (2 + (self.ep > 1)) * self.dim)
        )


def experts_of(job: Job) -> ExpertShape | None:
    """Return the sizes of the experts in a block of a job's model; None if the model has no experts."""
    if not job.model.sparse:
        return None
    model, layout = sparse(job), job.parallelism
    ranks = layout.dp_shard * layout.cp * layout.tp
    return ExpertShape(
        number=model.n_experts,
        ep=layout.ep,
        shards=ranks // layout.ep,
        rows=model.experts_per_token / layout.tp,
        dim=model.dim,
        width=model.expert_dim,
        used=SIZE[job.precision.compute_dtype],
        dense=model.first_k_dense_replace,
        sequence=layout.tp,
        chosen_experts=model.experts_per_token,
        groups=model.n_group,
        chosen_groups=model.topk_group,
        in_turn=job.debug.balance_experts,
    )


def shared_width(job: Job) -> int:
    """Return the total width of a sparse block's shared experts, which act as one dense feed-forward; 0 if there are
    none.
    """
    return sparse(job).n_shared_experts * sparse(job).expert_dim


def lighter(job: Job) -> float:
    """Return how many parameters a sparse block has more than a dense block."""
    model = sparse(job)
    return model.dim * (
        model.n_experts + 3 * (model.n_experts * model.expert_dim + shared_width(job) - model.ffn_width)
    )
