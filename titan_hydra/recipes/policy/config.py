"""The keys of pairs of answers, and of the objectives on log-probabilities; what these cannot be combined
with. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.ranges import POSITIVE
from titan_hydra.core.job.config.schema import Job, Objective
from titan_hydra.core.job.config.source import DigestedSource
from titan_hydra.recipes.chat.sources import RowSource, TemplateSource


@dataclass
class PairSource(TemplateSource, RowSource):
    pass


@dataclass
class RolloutSource(RowSource, DigestedSource):
    """Rollouts: their contents are part of the hash, as a loop writes each cycle's under the same name."""


@dataclass
class DirectPreference(Objective):
    beta: float = key(
        0.1, "DPO's beta: a larger value keeps the model closer to the reference model", POSITIVE, changes="learning"
    )


@dataclass
class PolicyGradient(Objective):
    clip: float = key(
        0.2,
        "PPO's clip: a token has no gradient once its probability ratio has left 1 +- clip in the direction of its advantage",
        POSITIVE,
        changes="learning",
    )


def faults(job: Job) -> Iterator[Fault]:
    """A loss of whole documents needs their indices and all of their tokens on one rank. The experts' balance loss is
    refused: it is scaled like a token's loss, and there is no loss of single tokens.
    """
    objective = f"objective={job.objective.name}"
    if not job.data.document_mask:
        yield Fault("data.document_mask", False, f"{objective} compares documents", legal=(True,))
    if job.parallelism.cp > 1:
        yield fault_at(job, "parallelism.cp", f"{objective} sums over whole documents", 1)
    if balance := getattr(job.model, "sequence_balance", 0):
        reason = f"it is scaled like a token's loss, and {objective} has none"
        yield Fault("model.sequence_balance", balance, reason, legal=(0,))
