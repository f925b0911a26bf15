"""Data of preference and policy training: rows with a preferred and a rejected answer, or with sampled tokens and their
advantages.

These rows are packed in the same way as conversations. The two answers of a pair are adjacent documents of one sample,
so that no layout separates them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_hydra.core.data.files import record_of
from titan_hydra.core.data.records import HubRecords, Record, Records
from titan_hydra.core.data.shards import BadRow
from titan_hydra.core.data.tokenizer import Tokenizer
from titan_hydra.core.data.unknown import ROWS
from titan_hydra.core.job.config import schema
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.recipes.chat.conversations import Conversation, conversation
from titan_hydra.recipes.chat.forms import question_of
from titan_hydra.recipes.chat.rows import (
    Chat,
    ConversationReader,
    Rendered,
    Turns,
    faults_of_first,
    faults_of_rows,
    open_rows,
    place_of_rows,
    warnings_of_first,
)
from titan_hydra.recipes.chat.sources import RowSource
from titan_hydra.recipes.chat.template import Template, load_template

from .config import PairSource, logprobs_read

if TYPE_CHECKING:
    from titan_hydra.core.data import Wanted

REFERENCE = ("ref_chosen_logps", "ref_rejected_logps")  # the columns that `titan data score-pairs` adds


class PairReader(ConversationReader):
    """Encodes the pair of answers of a given number. If `scored`, rows must have the reference's log-probabilities."""

    rows = "pairs"

    def __init__(self, lines: Records | HubRecords, template: Template, tokenizer: Tokenizer, scored: bool = True):
        super().__init__(lines, template, tokenizer, train_on="last")
        self.scored = scored

    def read(self, line: Record) -> Turns:
        """Encode a pair. A document's reference log-probability is stored at its last token, as only sums over
        documents are used.
        """
        row = record_of(line)
        answers = [self.encode(side) for side in pair_of(row)]
        values = [np.zeros(len(answer.tokens), dtype=np.float32) for answer in answers]
        for value, column in zip(values, REFERENCE if self.scored else (), strict=False):
            value[-1] = _number(row, column)
        return Turns(
            np.concatenate([answer.tokens for answer in answers]),
            np.concatenate([answer.trained for answer in answers]),
            tuple(len(answer.tokens) for answer in answers),
            {"reference": np.concatenate(values)},
        )


def pair_of(row: dict[str, Any]) -> tuple[Conversation, Conversation]:
    """Return the conversations with the preferred and the rejected answer. Raises ValueError if the row has no pair.

    A row has `chosen` and `rejected`: each a text, a message, or messages, the last of which is the answer. The messages
    of the question (`prompt`, or those of a row of conversations) come before both answers, unless these begin with
    them.
    """
    prompt, sides = question_of(row), []
    for name in ("chosen", "rejected"):
        answer = row.get(name)
        text, answer = isinstance(answer, str), [answer] if isinstance(answer, dict) else answer
        answer = [{"role": "assistant", "content": answer}] if text else answer
        if not isinstance(prompt or [], list) or not isinstance(answer, list) or not answer:
            raise ValueError("no pair in it: 'chosen', 'rejected' and 'prompt' must be texts or lists of messages")
        if conversation(answer, {}).messages[-1]["role"] != "assistant":
            raise ValueError(f"the last message of {name!r} is not the assistant's")
        sides.append(conversation(_joined(prompt or [], answer, name), row))
    if prompt is None and isinstance(row["chosen"], str):
        raise ValueError("its answers are texts, and the row has no question in 'prompt', which may be empty")
    return sides[0], sides[1]


def _joined(prompt: list[Any], answer: list[Any], name: str) -> list[Any]:
    """Return the messages of a question and its answer. The question may stand in both, with the system's text in either
    of them. Raises ValueError if the answer begins with another question.
    """
    before, after = (conversation(messages, {}).messages for messages in (prompt, answer))
    asked = [message for message in before if message["role"] != "system"]
    dialogue = [message for message in after if message["role"] != "system"]
    if asked and dialogue[: len(asked)] == asked:
        systems = [message for message in before if message["role"] == "system" and message not in after]
        return [*systems, *answer]
    if (
        asked
        and dialogue
        and dialogue[0]["role"] == "user"
        and (asked[-1]["role"] == "user" or dialogue[0] == asked[0])
    ):
        raise ValueError(f"{name!r} begins with a question of the user that is not the one of 'prompt'")
    return [*prompt, *answer]


def _number(row: dict[str, Any], column: str) -> float:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(
            f"{column!r} is {value!r}, not a number: `titan data score-pairs` adds the reference's log-probabilities"
        )
    return value


class RolloutReader(ConversationReader):
    """Reads the sampled tokens of a given number: ids, with their log-probabilities at sampling time and their
    advantages.
    """

    rows = "rollouts"

    def __init__(self, lines: Records | HubRecords, tokenizer: Tokenizer, vocab_size: int, logprobs: Sequence[str]):
        """Create the reader. `logprobs` are the columns of log-probabilities that rows must have."""
        self.lines, self.tokenizer, self.vocab_size, self.logprobs = lines, tokenizer, vocab_size, logprobs

    @property
    def signature(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.sha256}

    def read(self, line: Record) -> Turns:
        """Read a row."""
        return rollout(line, self.vocab_size, self.logprobs)


def rollout(line: Record, vocab_size: int, logprobs: Sequence[str] = ("old_logprobs",)) -> Turns:
    """Read a row of `tokens`. The columns `logprobs` and `advantages` belong to the last tokens; the tokens before those
    are the prompt. A single advantage applies to all tokens. Rows contain ids and not text, as encoding a text
    again can give other ids.
    """
    row = record_of(line)
    tokens, old, advantages = row.get("tokens"), row.get("old_logprobs"), row.get("advantages")
    if not isinstance(tokens, list) or not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        raise ValueError(f"'tokens' is not a list of ids below model.vocab_size={vocab_size}")
    if not _numbers(old) or not 0 < len(old) < len(tokens):
        raise ValueError(
            f"'old_logprobs' must be a list of numbers, one for each sampled token, and shorter than all {len(tokens)}"
        )
    advantages = advantages if isinstance(advantages, list) else [advantages] * len(old)
    if not _numbers(advantages) or len(advantages) != len(old):
        raise ValueError(f"'advantages' is neither a number nor a list of {len(old)}, one for each of 'old_logprobs'")
    prompt = len(tokens) - len(old)
    values = {name: row.get(name) for name in logprobs} | {"advantages": advantages}
    for name, numbers in values.items():
        if not _numbers(numbers) or len(numbers) != len(old):
            raise ValueError(
                f"{name!r} must be a list of {len(old)} numbers, one for each of 'old_logprobs', as objective.kl needs "
                "them: `titan data score-rollouts` adds them"
            )
    return Turns(
        np.array(tokens, dtype=np.int32),
        np.arange(len(tokens)) >= prompt,
        values={name: np.array([0.0] * prompt + numbers, dtype=np.float32) for name, numbers in values.items()},
    )


def _numbers(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) in (int, float) and math.isfinite(number) for number in value)


def open_preference(key: str, source: PairSource, wanted: Wanted, seed: int) -> Chat:
    """Open the pairs of data=preference."""
    template = load_template(key, source, wanted.job.tokenizer)
    return Chat(key, PairReader(open_rows(key, source, wanted), template, wanted.tokenizer), wanted, seed)


def open_rollouts(key: str, source: schema.Source, wanted: Wanted, seed: int) -> Chat:
    """Open the rows of data=rollouts."""
    return Chat(
        key,
        RolloutReader(
            open_rows(key, source, wanted),
            wanted.tokenizer,
            wanted.job.model.vocab_size,
            logprobs_read(wanted.job.objective),
        ),
        wanted,
        seed,
    )


def faults_of_pairs(key: str, source: PairSource, job: schema.Job) -> Iterator[Fault]:
    """Yield what is wrong with the template or with the first pairs. Imports no torch."""

    def scored(template: Template, source: schema.Source, line: Record) -> list[Rendered]:
        texts = _texts(template, source, line)
        for column in REFERENCE:
            _number(record_of(line), column)
        return texts

    return faults_of_first(key, source, job, "row", scored)


def warnings_of_pairs(key: str, source: PairSource, job: schema.Job) -> Iterator[Fault]:
    """Yield warnings about the text of the first pairs, and about pairs from which nothing is learned."""
    rows, alike = 0, 0

    def compared(template: Template, source: schema.Source, line: Record) -> list[Rendered]:
        nonlocal rows, alike
        (_, chosen, _), (_, rejected, _) = texts = _texts(template, source, line)
        rows, alike = rows + 1, alike + (chosen == rejected)
        return texts

    yield from warnings_of_first(key, source, job, compared)
    if alike:
        reason = (
            f"'chosen' and 'rejected' are the same in {alike} of the first {rows} rows, from which nothing is learned"
        )
        yield Fault(*place_of_rows(key, source, "train"), reason)


def _texts(template: Template, source: schema.Source, line: Record) -> list[Rendered]:
    return [(side, *template.spans(side, "last")) for side in pair_of(record_of(line))]


def faults_of_rollouts(key: str, source: RowSource, job: schema.Job) -> Iterator[Fault]:
    """Yield what is wrong with the first rollouts. Imports no torch."""

    def read(lines: Records | HubRecords) -> Iterator[Turns | BadRow]:
        """Yield the first rows as rollouts, or as BadRow."""
        for number in range(min(len(lines), ROWS)):
            where = f"row {number + 1}"
            try:
                where, line = lines.row(number)
                yield rollout(line, job.model.vocab_size, logprobs_read(job.objective))
            except BadRow as error:
                yield error
            except ValueError as error:
                yield BadRow(where, error)

    yield from faults_of_rows(key, source, job, read)
