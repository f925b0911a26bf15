"""Supervised fine-tuning on conversations, in which the assistant's tokens are learned."""

from titan_hydra.core.job.config.additions import Word
from titan_hydra.core.job.config.registry import DataSourceKind, ObjectiveKind, register

from .sources import ChatSource, ConversationSource

COMMANDS = {
    "data show": Word(
        f"{__name__}.data_command",
        "show a packed row, such as a conversation, with what it would teach marked, and lengths and shares of all rows",
        ("titan data show data=embedded_chat", "titan data show data=embedded_chat --row 3"),
    ),
    "generate chat": Word(
        f"{__name__}.chat_command",
        "let the model of a run or checkpoint answer a question",
        (
            'titan generate chat c992 --prompt "What is 3 + 4?"',
            'titan generate chat c992 --prompt "Who are you?" --temperature 0',
        ),
    ),
}
TURNS = ("tokens", "trained", "documents")  # the arrays of a sample of packed rows
LINES = (".jsonl", ".json", ".parquet")
TEMPLATE = f"{__name__}.template_of_run:template_and_stop"
ROWS = f"{__name__}.rows"
register(
    ObjectiveKind(
        "sft",
        f"{__name__}.objective:SupervisedFineTuning",
        needs=TURNS,
        head_loss=True,
        split_logits=True,
        cases=f"{__name__}.cases:CASES",
        exact=f"{__name__}.exact:loss_of_answers",
    )
)
register(
    DataSourceKind(
        "chat",
        f"{ROWS}:open_chat",
        ChatSource,
        documents=False,
        needs_path=True,
        suffixes=LINES,
        gives=TURNS,
        encodes=True,
        faults=f"{ROWS}:faults",
        warnings=f"{ROWS}:warnings_of_chat",
        template=TEMPLATE,
    )
)
register(
    DataSourceKind(
        "embedded_chat",
        f"{ROWS}:open_chat",
        ConversationSource,
        documents=False,
        gives=TURNS,
        encodes=True,
        faults=f"{ROWS}:faults",
        warnings=f"{ROWS}:warnings_of_chat",
        template=TEMPLATE,
    )
)
