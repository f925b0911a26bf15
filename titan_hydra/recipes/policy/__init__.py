"""Learning from whole answers: pairs with a preferred answer (dpo), and sampled tokens with advantages (policy)."""

from titan_hydra.core.job.config.additions import Word
from titan_hydra.core.job.config.registry import DataSourceKind, ObjectiveKind, register
from titan_hydra.recipes.chat import LINES, TEMPLATE, TURNS

from .config import DirectPreference, PairSource, PolicyGradient, RolloutSource

COMMANDS = {
    "data score-pairs": Word(
        f"{__name__}.score_command",
        "write beside pairs of answers the log-probabilities that a reference gives them",
        (
            "titan data score-pairs c992 pairs.jsonl --out scored.jsonl",
            "titan data score-pairs c992 pairs.jsonl --out scored.jsonl --max-bad-rows 1",
        ),
    ),
    "data score-rollouts": Word(
        f"{__name__}.score_command:of_rollouts",
        "write beside rollouts the log-probabilities that a model gives to each sampled token",
        (
            "titan data score-rollouts c992 drawn.jsonl --out scored.jsonl",
            "titan data score-rollouts c992 drawn.jsonl --column old_logprobs --out scored.jsonl",
        ),
    ),
}
OF_PAIRS, OF_ROLLOUTS = (*TURNS, "reference"), (*TURNS, "old_logprobs", "advantages")
ROWS, LOSSES = f"{__name__}.rows", f"{__name__}.objectives"
register(
    ObjectiveKind(
        "dpo",
        f"{LOSSES}:Preference",
        DirectPreference,
        needs=OF_PAIRS,
        head_loss=True,
        split_logits=True,
        cases=f"{__name__}.cases:OF_PAIRS",
        exact=f"{__name__}.exact:preference",
        faults=f"{__name__}.config:faults",
    )
)
register(
    ObjectiveKind(
        "policy",
        f"{LOSSES}:ClippedPolicy",
        PolicyGradient,
        needs=OF_ROLLOUTS,
        head_loss=True,
        split_logits=True,
        cases=f"{__name__}.cases:OF_ROLLOUTS",
        exact=f"{__name__}.exact:clipped",
        faults=f"{__name__}.config:faults_of_policy",
    )
)
register(
    DataSourceKind(
        "preference",
        f"{ROWS}:open_preference",
        PairSource,
        documents=False,
        needs_path=True,
        suffixes=LINES,
        gives=OF_PAIRS,
        encodes=True,
        faults=f"{ROWS}:faults_of_pairs",
        warnings=f"{ROWS}:warnings_of_pairs",
        template=TEMPLATE,
    )
)
register(
    DataSourceKind(
        "rollouts",
        f"{ROWS}:open_rollouts",
        RolloutSource,
        documents=False,
        needs_path=True,
        suffixes=LINES,
        gives=(*OF_ROLLOUTS, "ref_logprobs"),
        encodes=True,
        faults=f"{ROWS}:faults_of_rollouts",
        sampled=True,
    )
)
