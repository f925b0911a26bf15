"""The forms that a row of conversations can have, each brought into a list of messages. Imports no torch."""

from typing import Any

QUESTIONS = ("instruction", "prompt", "question", "query")
ANSWERS = ("output", "completion", "response", "answer")
BEHIND = ("input", "context")  # columns with a text that belongs behind the question
CHOICES = ("choices", "options")  # columns of which nobody says how a question prints them
JUDGED = ("label", "kto_tag")  # columns of whether an answer is a good one
OF_ANSWER = ("reasoning_content", "thinking", "reasoning", "weight", "train", "training")  # what an answer may have


def messages_of(row: dict[str, Any]) -> Any:
    """Return the messages of a row: `messages`, ShareGPT's `conversations`, or a question and its answer. Raises
    ValueError if the row has none of these.
    """
    if wrong := next((key for key in JUDGED if isinstance(row.get(key), bool)), None):
        raise ValueError(f"its {wrong!r} says whether the answer is a good one, which data=chat does not learn from")
    if (messages := _messages(row)) is not None:
        return messages
    question, answer = _one_of(QUESTIONS, row), _one_of(ANSWERS, row)
    if question is None or answer is None:
        raise ValueError(
            "no list of messages under 'messages' (or 'conversations'), and no question with its answer, such as "
            "'instruction' and 'output' or 'prompt' and 'completion'"
            + (", but " + ", ".join(map(repr, row)))
            * bool(row)
        )
    # of a prompt only the completion is learned
    before = [
        {"weight": 0, **message} if _is_answer(message) else message
        for message in _as_messages(row[question], "user", question)
    ]
    beside_answer = {key: row[key] for key in OF_ANSWER if row.get(key) is not None}
    answers = [
        message | beside_answer if _is_answer(message) else message
        for message in _as_messages(row[answer], "assistant", answer)
    ]
    return [*_history(row), *_with_input(before, row, question), *answers]


def question_of(row: dict[str, Any]) -> list[Any] | None:
    """Return the messages before both answers of a pair; None if the row has no question."""
    question = _one_of(QUESTIONS, row)
    if question is None:
        return _messages(row)
    return [*_history(row), *_with_input(_as_messages(row[question], "user", question), row, question)]


def _messages(row: dict[str, Any]) -> Any:
    return next((row[key] for key in ("messages", "conversations") if row.get(key) is not None), None)


def _one_of(keys: tuple[str, ...], row: dict[str, Any]) -> str | None:
    """Return the only one of the keys that a row has; None if it has none. Raises ValueError if it has several."""
    present = [key for key in keys if row.get(key) is not None]
    if len(present) > 1:
        raise ValueError(f"it has {' and '.join(map(repr, present))}, of which only one can be used")
    return present[0] if present else None


def _as_messages(value: Any, role: str, key: str) -> list[Any]:
    """Return the messages of a column: a list, or a message itself, or one of `role` with a text that is not empty."""
    if isinstance(value, str):
        return [{"role": role, "content": value}] if value.strip() else []
    if not isinstance(value, list | dict):
        raise ValueError(f"its {key!r} is {type(value).__name__}, neither a text nor messages")
    return value if isinstance(value, list) else [value]


def _is_answer(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant"


def _with_input(messages: list[Any], row: dict[str, Any], question: str) -> list[Any]:
    """Return a question with the texts that belong behind it."""
    if wrong := next((key for key in CHOICES if row.get(key)), None):
        raise ValueError(f"it has {wrong!r}, which no template prints; write them into {question!r}")
    behind = {key: row[key] for key in BEHIND if row.get(key)}
    if not behind:
        return messages
    if wrong := next((key for key, text in behind.items() if not isinstance(text, str)), None):
        raise ValueError(f"its {wrong!r} is {type(behind[wrong]).__name__}, not text")
    if not isinstance(row[question], str):
        raise ValueError(f"it has {next(iter(behind))!r} beside messages in {question!r}")
    texts = [text for text in (row[question], *behind.values()) if text.strip()]
    return [{"role": "user", "content": "\n".join(texts)}]


def _history(row: dict[str, Any]) -> list[Any]:
    """Return the earlier questions and answers of a row, which are pairs of texts."""
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise ValueError("its 'history' is not a list of pairs, each a question and its answer")
    roles = ("user", "assistant")
    return [{"role": role, "content": text} for pair in history for role, text in zip(roles, pair, strict=True)]
