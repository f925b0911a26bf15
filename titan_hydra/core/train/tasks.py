"""Score the requests of tasks with the model in training, on the layout of the run. Each request is a row of a batch,
and each of its tokens counts once, whatever the layout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_hydra.core.data.batch import Batch
from titan_hydra.core.data.tasks import Request
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.parallel import tensor as tensor_parallel
from titan_hydra.core.parallel.loss_head import Vocabulary, losses_of, over_ranks

from .objectives import Tensors
from .objectives.language import IGNORED, Language
from .trainer import Trainer

STEP = 32  # the rows of a batch have a multiple of this many tokens on each rank, which every number format accepts
AT_ONCE = 1024  # number of tokens whose logits are converted to float32 at a time


class Scoring(Language):
    """Collects the log-probability of a batch's labels, and how many of them are the likeliest tokens, row by row."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.found: list[Tensor] = []  # numbers [rows, 2] of each batch or microbatch, in order

    def inputs(self, batch: Tensors) -> tuple[Tensor, Tensors]:
        """Return the inputs for logits, even if the job's head can compute the loss."""
        return batch["tokens"], {name: batch[name] for name in ("positions",) if name in batch}

    def measure(self, output: Tensor, batch: Tensors) -> Tensor:
        """Keep the numbers of a batch's rows in `found`, and return 0 as the sum. `output` has the logits."""
        labels = batch["labels"]
        logits, vocabulary = own_logits(output)
        rows, all_positions = (labels != IGNORED).nonzero(as_tuple=True)
        numbers = torch.zeros(len(labels), 2, dtype=torch.float64, device=labels.device)
        # all ranks that split the vocabulary have the same labels, and so make the same number of turns
        for row, positions in zip(rows.split(AT_ONCE), all_positions.split(AT_ONCE), strict=True):
            some, right = logits[row, positions].float(), labels[row, positions].unsqueeze(1)
            losses = losses_of(some, right, vocabulary, None)
            hits = likeliest(some, vocabulary) == right
            numbers.index_add_(0, row, torch.cat([-losses, hits.float()], dim=1).double())
        self.found.append(numbers)
        return torch.zeros((), device=labels.device)


def own_logits(output: Tensor) -> tuple[Tensor, Vocabulary | None]:
    """Return this rank's logits [batch, seq, n], and the part of the vocabulary that they stand for (None: all of it)."""
    if not isinstance(output, DTensor):
        return output, None
    (placement,), mesh = output.placements, output.device_mesh
    if placement.is_replicate():
        return output.to_local(), None
    first = mesh.get_local_rank() * -(-output.shape[-1] // mesh.size())
    return output.to_local(), Vocabulary(mesh.get_group(), first)


def likeliest(logits: Tensor, vocabulary: Vocabulary | None) -> Tensor:
    """Return the token with the largest of logits [tokens, n], as [tokens, 1]; the first one if several are equal."""
    largest, token = logits.max(dim=1, keepdim=True)
    if vocabulary is None:
        return token
    largest_here, token = largest.clone(), token + vocabulary.first
    over_ranks(largest, vocabulary, dist.ReduceOp.MAX)
    return over_ranks(token.where(largest_here == largest, torch.iinfo(token.dtype).max), vocabulary, dist.ReduceOp.MIN)


@torch.no_grad()
def score_requests(trainer: Trainer, requests: Sequence[Request]) -> list[tuple[float, bool]]:
    """Return for each request the log-probability of its scored tokens, and whether each of them is the likeliest. This
    is a collective.

    Requests of about the same length share a batch, whose rows are as short as the layout allows.
    """
    job, mesh, scoring = trainer.job, trainer.mesh, Scoring(trainer.job)
    size, first = job.data.local_batch, mesh.data_rank * job.data.local_batch
    order = sorted(range(len(requests)), key=lambda number: -requests[number].length)
    totals = torch.zeros(len(requests), 2, dtype=torch.float64, device=trainer.device)
    trainer.model.eval()
    trainer.prepare_weights()
    for begin in range(0, len(order), mesh.data_ranks * size):
        length = row_length(job, requests[order[begin]].length)
        of_rank = order[begin : begin + mesh.data_ranks * size][first : first + size]
        batch = batch_of_requests([requests[number] for number in of_rank], scoring, size, length)
        with tensor_parallel.loss_context(mesh):
            trainer.step.forward(trainer.prepare(batch), scoring)
        if of_rank and mesh.reports_loss and trainer.step.has_loss:
            totals[of_rank] += torch.cat(scoring.found)[: len(of_rank)]
        scoring.found.clear()
    dist.all_reduce(totals)
    trainer.model.train()
    return [
        (log, hits == len(request.ids) - request.given)
        for (log, hits), request in zip(totals.tolist(), requests, strict=True)
    ]


def row_length(job: Job, longest: int) -> int:
    """Return the length of a batch's rows: data.seq_len, halved as long as `longest` tokens fit. Pipeline stages and
    compiled blocks have one length.
    """
    length, degrees = job.data.seq_len, job.parallelism
    if degrees.pp > 1 or job.compile.name != "off":
        return length
    step = STEP * degrees.tp * degrees.sequence_parts
    while length % (2 * step) == 0 and length // 2 >= longest:
        length //= 2
    return length


def batch_of_requests(requests: Sequence[Request], scoring: Scoring, rows: int, length: int) -> Batch:
    """Return requests as a batch of `rows` rows. Rows without a request have no labels."""
    tokens, labels = np.zeros((rows, length), np.int64), np.full((rows, length), IGNORED, np.int64)
    for row, request in enumerate(requests):
        tokens[row, : request.length] = request.ids[:-1]
        labels[row, request.given - 1 : request.length] = request.ids[request.given :]
    return scoring.assembled({"tokens": tokens, "labels": labels})
