"""The experts of a block as one rank sees them: how many weights, rows and bytes. All experts are taken to get as many
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from titan_hydra.config.schema import Job
from titan_hydra.job.dtypes import SIZE
from titan_hydra.job.experts import sparse


@dataclass(frozen=True)
class ExpertShape:
    """`rows` are those that a rank's experts compute, for each token of a context-parallel rank. Widths are elements of
    a row.
    """

    number: int  # of the model's block
    ep: int
    shards: int  # ranks over which the experts of an ep rank are sharded
    rows: float
    dim: int
    width: int
    used: int  # bytes of an element
    dense: int  # blocks of the model without experts, the first ones
    sequence: int  # ranks over which the tokens of a router are split

    @property
    def parameters(self) -> float:
        """The weights of a block's experts that an ep rank holds, before they are sharded."""
        return self.number / self.ep * 3 * self.dim * self.width

    @property
    def outputs(self) -> list[float]:
        """The elements of a token in the outputs of the router and of the three grouped matmuls, in running order."""
        return [self.number / self.sequence, self.rows * self.width, self.rows * self.width, self.rows * self.dim]

    @property
    def sent(self) -> float:
        """The bytes of a token that travel to the experts' ranks, or back."""
        return self.rows * self.dim * self.used * (self.ep > 1)

    @property
    def chosen(self) -> float:
        """The bytes of a token that selective checkpointing keeps beside outputs of matmuls: what was sent, scores and
        indices.
        """
        return 2 * self.sent + 12 * self.rows

    @property
    def traffic(self) -> float:
        """The bytes of memory traffic of a token beside matmuls: rows put in order and back, weighted and added up, and
        the activation.
        """
        return self.rows * self.used * ((5 + 4 * (self.ep > 1)) * self.dim + 5 * self.width)

    @property
    def everything(self) -> float:
        """The bytes of a token that the forward keeps for the backward: rows before and after the experts, four widths
        between them, scores of all experts in float32, and orders.
        """
        orders = 16 * (1 + (self.ep > 1))
        return self.rows * (self.used * (2 * self.dim + 4 * self.width) + orders) + 12 * self.number / self.sequence

    def backward(self, again: bool) -> float:
        """Return the bytes of a token that the backward holds beside `everything`, some of which it has freed: in the
        experts, or, if it computes the block again, where rows go back to their tokens.
        """
        return self.rows * self.used * max(self.width, 2 * self.width - self.dim, again * (2 + (self.ep > 1)) * self.dim)


def experts_of(job: Job) -> ExpertShape | None:
    """Return the experts of a block of a job; None if its model has none."""
    if not job.model.sparse:
        return None
    model, layout = sparse(job), job.parallelism
    ranks = layout.dp_shard * layout.cp * layout.tp
    return ExpertShape(
        model.n_experts,
        layout.ep,
        ranks // layout.ep,
        model.experts_per_token / layout.tp,
        model.dim,
        model.expert_dim,
        SIZE[job.precision.compute_dtype],
        model.first_k_dense_replace,
        layout.tp,
    )


def shared_width(job: Job) -> int:
    """Return the width of a sparse block's dense feed-forward, which is its shared experts; 0 without them."""
    return sparse(job).n_shared_experts * sparse(job).expert_dim


def lighter(job: Job) -> float:
    """Return how many parameters fewer a dense block has than a sparse one."""
    model = sparse(job)
    return model.dim * (model.n_experts + 3 * (model.n_experts * model.expert_dim + shared_width(job) - model.ffn_width))
