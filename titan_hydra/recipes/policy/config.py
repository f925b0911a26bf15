"""The keys of pairs of answers, and of the objectives on log-probabilities. Imports no torch."""

from dataclasses import dataclass

from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.ranges import POSITIVE
from titan_hydra.core.job.config.schema import Objective
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
