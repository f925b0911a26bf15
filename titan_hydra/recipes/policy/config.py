"""The keys of pairs of answers, and of the objectives on log-probabilities; what these cannot be combined
with. Imports no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.ranges import NOT_NEGATIVE, POSITIVE
from titan_hydra.core.job.config.registry import DATA_SOURCES
from titan_hydra.core.job.config.schema import Job, Objective
from titan_hydra.core.job.config.source import DigestedSource, data_sources
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
    clip_high: float | None = key(
        None,
        "the clip above 1, which DAPO makes larger than the one below 1; null: that of objective.clip",
        POSITIVE,
        identity="if set",
        changes="learning",
    )
    kl: float | None = key(
        None,
        "coefficient of the KL divergence from a reference, whose log-probabilities are in the column ref_logprobs; 0 "
        "only measures it; null: the column is not read",
        NOT_NEGATIVE,
        identity="if set",
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


def logprobs_read(objective: Objective) -> tuple[str, ...]:
    """Return the columns of log-probabilities that an objective reads from rollouts."""
    return ("old_logprobs",) if getattr(objective, "kl", None) is None else ("old_logprobs", "ref_logprobs")


def faults_of_policy(job: Job) -> Iterator[Fault]:
    """A divergence from a reference needs sources that give the reference's log-probabilities."""
    for section, source in data_sources(job.data).items():
        kl = getattr(job.objective, "kl", None)
        if kl is not None and "ref_logprobs" not in DATA_SOURCES[source.name].gives:
            yield Fault("objective.kl", kl, f"{section}.name={source.name} gives no ref_logprobs", (None,))
