"""Check what is the same in all layouts of a job: the distribution of initial weights, and the order of samples."""

from __future__ import annotations

import math

from torch import Tensor

from titan_hydra.core.data.batch import Batch
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.registry import DATA_SOURCES, OBJECTIVES
from titan_hydra.core.job.config.schema import Job


def odd_starts(start: dict[str, Tensor], job: Job) -> int:
    """Count the initial tensors of a text decoder whose mean or standard deviation is more than six standard errors
    away from that of its distribution. Return 0 for other models, for families with a reference of their own and for mup, which
    have distributions of their own.
    """
    has_own_reference = family_of(job.model).exact is not None
    if has_own_reference or OBJECTIVES[job.objective.name].makes != "tokens" or job.parametrization.name != "standard":
        return 0
    count = 0
    for name, weight in start.items():
        mean, deviation = distribution(name, job.model, weight.shape[-1])
        several = weight.numel() > 1
        error = deviation / math.sqrt(weight.numel())
        spread = weight.double().std().item() if several else deviation
        count += abs(weight.double().mean().item() - mean) > 6 * error + 1e-7 or abs(spread - deviation) > 6 * error
    return count


def distribution(name: str, model: Model, inputs: int) -> tuple[float, float]:
    """Return the mean and the standard deviation of a parameter's initial values. A decoder has TorchTitan's initial
    values, an adapter those of the LoRA paper's code, in which they depend on the number of `inputs`.
    """
    *_, owner, leaf = name.split(".")
    if leaf.startswith("lora_"):
        return 0.0, 1 / math.sqrt(3 * inputs) if leaf.startswith("lora_a") else 0.0
    if "norm" in name:
        return 1.0, 0.0
    if name == "tok_embeddings.weight" and not model.tie_embeddings:
        return 0.0, 1.0
    if not name.startswith("layers."):
        return 0.0, 0.98658 / math.sqrt(model.dim)  # a normal distribution that is cut at three standard deviations
    writes = (owner if leaf == "weight" else leaf) in ("wo", "w2", "w3")
    return 0.0, 0.02 / math.sqrt(2 * int(name.split(".")[1]) + 2) if writes else 0.02


class Order:
    """Follows the samples of a run. `faults` counts the samples of a batch that the run has had before, and the samples
    whose first token is not the last label of the previous sample in the same slot.
    """

    def __init__(self, job: Job) -> None:
        source = DATA_SOURCES.get(job.data.name)
        self.follows = source is not None and source.documents and not job.data.shuffle_buffer
        self.language, self.seen = job.objective.name == "language", set[bytes]()
        self.left: Tensor | None = None

    def faults(self, batch: Batch) -> int:
        count = self.repeated(batch)
        if self.follows:
            if self.left is not None:  # a label that does not count is -1 and cannot be compared
                count += int(((self.left >= 0) & (self.left != batch["tokens"][:, 0])).sum())
            self.left = batch["labels"][:, -1]
        return count

    def repeated(self, batch: Batch) -> int:
        """Count the samples whose tokens (for images: whose noise) the run has had before. Objectives other than
        language modelling and diffusion are not checked: they have few rows, which are repeated in each epoch.
        """
        name = "noise" if "noise" in batch.tensors else "tokens"
        if name == "tokens" and not self.language:
            return 0
        rows = [row.numpy().tobytes() for row in batch[name]]
        known = len(self.seen)
        self.seen.update(rows)
        return len(rows) - (len(self.seen) - known)
