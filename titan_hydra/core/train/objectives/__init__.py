"""Objectives, one in each module. An objective defines what a sample is, which of its elements count, the inputs of the
model, and the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from titan_hydra.core.data.batch import Batch, Dims
from titan_hydra.core.data.loader import Sample
from titan_hydra.core.job.config.registry import OBJECTIVES, resolve
from titan_hydra.core.job.config.schema import Job

Tensors = dict[str, Tensor]  # the tensors of a batch, by name


class Objective(ABC):
    """What is learned (`objective.name`). It has no state, so that it can be built anywhere; `batch` runs in the data
    thread.

    The loss of a step is the sum of `loss` over its microbatches, divided by the sum of `count` over the whole global
    batch.
    """

    dims: Mapping[str, Dims]  # for every tensor that `batch` can return, the dimensions along which it is cut
    # names of numbers beside the loss, each the mean of a further sum of `loss` over the elements that count
    columns: tuple[str, ...] = ()

    def __init__(self, job: Job) -> None:
        self.job = job
        self.keys: Any = job.objective  # the job's section with this objective's keys

    @abstractmethod
    def blank_sample(self) -> Sample:
        """Return a sample in the form in which the data source gives samples, of which no element counts: such samples
        fill the last batch of steps=epoch. All samples have the same shapes.
        """

    @abstractmethod
    def batch(self, samples: Sequence[Sample], separators: tuple[int | None, int | None]) -> Batch:
        """Return samples as a batch in host memory. `separators` are the begin- and end-of-text ids of the data
        source.
        """

    @abstractmethod
    def count(self, batch: Tensors) -> Tensor:
        """Return the number of elements that count, or the sum of their weights. The batch has whole sequences, or this
        rank's part of each sequence.
        """

    @abstractmethod
    def inputs(self, batch: Tensors) -> tuple[Tensor, Tensors]:
        """Return the arguments of the model's forward: the first one, which in a pipeline only the first stage gets,
        and all others by name.
        """

    @abstractmethod
    def loss(self, output: Tensor, batch: Tensors) -> Tensor:
        """Return the loss summed over the elements that count. `output` is the model's output. compile=block compiles
        this function too. An objective with `columns` returns a vector: this sum, which alone has a gradient, and the
        sum of each column.
        """

    def measure(self, output: Tensor, batch: Tensors) -> Tensor:
        """Return the sum that a validation divides by the number of elements that count, to measure the model; with
        `columns`, a vector as `loss` does.
        """
        return self.loss(output, batch)

    def named(self, means: Sequence[float]) -> dict[str, float]:
        """Return the means of `columns` by the names that they have in metrics.jsonl: OBJECTIVE/COLUMN."""
        return {f"{self.job.objective.name}/{name}": mean for name, mean in zip(self.columns, means, strict=True)}

    def warnings_of_first_step(self, means: Mapping[str, float]) -> Iterator[str]:
        """Yield warnings about the `named` means of a run's first step."""
        return iter(())

    def example(self, samples: int) -> Batch:
        """Return a batch of zeros with the shapes of real batches. Each of its samples is a single document."""
        return self.batch([self.blank_sample()] * samples, (None, None))


def build_objective(job: Job) -> Objective:
    """Build the job's objective."""
    return resolve(OBJECTIVES[job.objective.name].build)(job)
