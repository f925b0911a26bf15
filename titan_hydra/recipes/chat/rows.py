"""Conversations as samples: a template turns each into text, which is tokenized as a whole; short ones share a sample.

The conversations of an epoch, in their order, are divided into windows of WINDOW conversations. The conversations of a
window are packed into samples by first-fit decreasing, and none is split. The samples of all windows form one sequence,
which is distributed over the slots. So nothing depends on the layout, and a slot's position is a window and the number
of the window's first sample. Every rank encodes all conversations, as it needs their lengths.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import files, tokenizer, unknown
from titan_hydra.core.data.first_rows import faults_in_files, faults_in_rows
from titan_hydra.core.data.permutation import permute
from titan_hydra.core.data.records import SUFFIXES, HubRecords, Record, Records
from titan_hydra.core.data.shards import UNLIMITED, BadRow, BadShard, BadShards
from titan_hydra.core.data.tokenizer import Tokenizer
from titan_hydra.core.job.config import schema
from titan_hydra.core.job.config.fault import Fault, counted
from titan_hydra.core.job.config.files import home
from titan_hydra.core.job.inputs import PATIENCE

from . import template
from .conversations import Conversation, parse
from .printed import forgotten
from .sources import ConversationSource, RowSource, TemplateSource

if TYPE_CHECKING:
    from titan_hydra.core.data import Wanted

READING = 3  # changes whenever the same row gives other tokens than before, so that an older run is not resumed
# number of conversations that are packed together; with 200 tokens each, in samples of 8,192 tokens, 2 % is padding
WINDOW = 1000
TRIED = 10  # seconds that a template may take for the first row when the launcher checks it
MARK = re.compile(r"<\|?[\w-]+\|?>")  # special tokens in a template, such as <|im_end|> and <start_of_turn>


@dataclass(frozen=True)
class Turns:
    """The tokens of a conversation, or of documents that must share a sample; `trained` marks the learned tokens."""

    tokens: np.ndarray
    trained: np.ndarray
    documents: tuple[int, ...] = ()  # lengths of the documents, if there are several
    values: dict[str, np.ndarray] = field(default_factory=dict)  # further arrays, by name, with a number for each token

    @property
    def size(self) -> dict[str, int]:
        """How much room these tokens need in a sample, by unit."""
        return {"tokens": len(self.tokens)}


class ConversationReader:
    """Encodes the conversation of a given number. A subclass for other rows overrides `read` and `rows`, their name in
    messages.
    """

    rows = "conversations"

    def __init__(self, lines: Records | HubRecords, template: template.Template, tokenizer: Tokenizer, train_on: str):
        self.lines, self.template, self.tokenizer, self.train_on = lines, template, tokenizer, train_on
        self.special = re.compile("|".join(map(re.escape, tokenizer.special)) or "(?!)")

    @property
    def signature(self) -> dict[str, Any]:
        """Everything that determines the tokens of the rows."""
        source = hashlib.sha256(self.template.source.encode()).hexdigest()
        options = {"chat_template_kwargs": self.template.options} if self.template.options else {}
        content = {"tokenizer": self.tokenizer.sha256, "chat_template": source, "train_on": self.train_on} | options
        return content | {"reading": READING}

    def turns(self, number: int) -> Turns:
        """Return the tokens of a conversation. Raises BadRow, with file and line, if the conversation cannot be used."""
        where, line = self.lines.row(number)
        try:
            return self.read(line)
        except ValueError as error:
            raise BadRow(where, error) from error
        except ConfigError as error:
            raise ConfigError(f"{error} ({where})") from error

    def read(self, line: Record) -> Turns:
        """Encode a row."""
        return self.encode(parse(line))

    def encode(self, conversation: Conversation) -> Turns:
        """Encode a conversation. A token that lies partly in a learned range is learned. Raises ValueError if the
        conversation cannot be used.
        """
        if name := self.special.search(conversation.everything):
            raise ValueError(f"it holds {name[0]}, whose characters would be encoded as that special token")
        text, spans = self.template.spans(conversation, self.train_on)
        located = self.tokenizer.locate(text)
        trained = np.zeros(len(located.ids), dtype=bool)
        for begin, end in spans:
            trained |= (located.begins < end) & (located.ends > begin)
        if not trained[1:].any():
            raise ValueError("nothing to learn in it: the assistant has no token")
        return Turns(np.array(located.ids, dtype=np.int32), trained)

    def text(self, turns: Turns, begin: int, end: int) -> str:
        """Return the text to show for the tokens from `begin` to `end`, of which either all or none are learned."""
        return self.tokenizer.decode(turns.tokens[begin:end].tolist())


class Chat:
    """Packed samples {tokens, trained, documents}, each [seq_len + 1]. Places without a conversation are filled with a
    document of end-of-text tokens.
    """

    separators = (None, None)  # no separator tokens, as `documents` numbers the documents

    def __init__(self, key: str, reader: ConversationReader, wanted: Wanted, seed: int):
        """Open the rows. They are packed window by window, and each slot remembers where it is."""
        self.key, self.reader, self.seq_len, self.seed, self.bad = (
            key,
            reader,
            wanted.job.data.seq_len,
            wanted.order(seed),
            wanted.bad,
        )
        self.tokenizer, self.once = reader.tokenizer.sha256, wanted.once
        self.room = {"tokens": self.seq_len + 1}  # capacity of a sample, by unit
        self.limit = f"data.seq_len={self.seq_len} + 1 tokens"  # the capacity as messages print it
        self.windows = -(-len(reader.lines) // WINDOW)  # number of windows in an epoch
        # for each slot: the window of its last sample, and the number of that window's first sample
        self.places = dict.fromkeys(wanted.slots, (0, 0))
        self.packed = functools.lru_cache(4)(self._pack)
        self.signature = {"conversations": len(reader.lines)} | reader.signature

    def in_epoch(self) -> int:
        """Count the samples of the first epoch, by packing all its rows."""
        told = time.monotonic()
        total = 0
        for window in range(self.windows):
            total += len(self._pack(window))
            if time.monotonic() - told > PATIENCE:
                told, done = time.monotonic(), min((window + 1) * WINDOW, len(self.reader.lines))
                line = f"{self.key}: packed {done:,} of {len(self.reader.lines):,} {self.reader.rows}"
                print(line, file=sys.stderr, flush=True)
        return total

    def sample(self, number: int, slot: int) -> dict[str, np.ndarray]:
        """Return a sample by its number, which is not below that of the slot's last one: windows are packed until one
        has it.
        """
        window, first = self.places[slot]
        empty = 0
        while number >= first + len(samples := self.packed(window)):
            empty = 0 if samples else empty + 1
            if empty == self.windows:
                reasons = [""] + [f": {reason}" for reason in self.bad.found.values()]
                raise ConfigError(f"{self.key}: no usable conversation in it{reasons[-1]}")
            window, first = window + 1, first + len(samples)
        self.places[slot] = window, first
        last = window == self.windows - 1 and number == first + len(samples) - 1
        if self.once is not None and (window >= self.windows or (number + 1 == self.once) is not last):
            raise ConfigError(
                f"{self.key}: one pass has another number of samples here than the launcher counted, {self.once:,}; are "
                "the rows, the tokenizer and its library the same?"
            )
        return self._filled(samples[number - first])

    def state(self, slot: int) -> dict[str, int]:
        window, first = self.places[slot]
        return {"window": window, "first": first}

    def load(self, slot: int, state: dict[str, int]) -> None:
        self.places[slot] = state["window"], state["first"]

    def takes(self, turns: Turns) -> bool:
        """Whether a sample has room for a row."""
        return all(turns.size[unit] <= room for unit, room in self.room.items())

    def _pack(self, window: int) -> list[list[Turns]]:
        """Return the samples of a window. Conversations that are too long are left out. The first epoch counts them,
        later epochs do not.
        """
        epoch, window_of_epoch = divmod(window, self.windows)
        first, rows = window_of_epoch * WINDOW, len(self.reader.lines)
        turns, long = [], []
        for number in range(first, min(first + WINDOW, rows)):
            index = number if self.seed is None else permute(number, rows, self.seed, epoch)
            try:
                encoded = self.reader.turns(index)
            except BadShard as error:
                self.bad.add(error)
                continue
            if self.takes(encoded):
                turns.append(encoded)
            else:
                long.append((self.reader.lines.row(index)[0], len(encoded.tokens)))
        if long and epoch == 0:
            where, tokens = long[0]
            name = f"{UNLIMITED}{self.key}, conversations {first + 1} to {min(first + WINDOW, rows)}"
            self.bad.add(
                BadShard(name, f"{len(long)} conversations with more than {self.limit}, as {where} with {tokens:,}")
            )
        packed = first_fit(turns, self.room)
        return [
            packed[index if self.seed is None else permute(index, len(packed), self.seed, window, 0)]
            for index in range(len(packed))
        ]

    def _filled(self, together: list[Turns]) -> dict[str, np.ndarray]:
        """Return the arrays of one sample from its conversations."""
        room = self.seq_len + 1 - sum(len(turns.tokens) for turns in together)
        values = {name: np.zeros(room, dtype=np.float32) for name in together[0].values}
        rest = Turns(
            np.full(room, self.reader.tokenizer.eos_id, dtype=np.int32), np.zeros(room, dtype=bool), values=values
        )
        parts = [*together, rest]
        lengths = [length for part in parts for length in part.documents or (len(part.tokens),)]
        return {
            "tokens": np.concatenate([part.tokens for part in parts]),
            "trained": np.concatenate([part.trained for part in parts]),
            "documents": np.repeat(np.arange(len(lengths), dtype=np.int32), lengths),
            **{name: np.concatenate([part.values[name] for part in parts]) for name in values},
        }


def first_fit(turns: list[Turns], room: dict[str, int]) -> list[list[Turns]]:
    """Pack conversations, the longest first, each into the first sample with `room` for it. Conversations of equal
    length keep their order.
    """
    left, packed = np.tile([*room.values()], (len(turns), 1)), []
    for row in sorted(turns, key=lambda row: -len(row.tokens)):
        need = [row.size[unit] for unit in room]
        fits = (left[: len(packed)] >= need).all(axis=1)
        sample = int(np.argmax(fits)) if fits.any() else len(packed)
        if sample == len(packed):
            packed.append([])
        packed[sample].append(row)
        left[sample] -= need
    return packed


def open_chat(key: str, source: ConversationSource, wanted: Wanted, seed: int) -> Chat:
    """Open the conversations of data=chat or data=embedded_chat."""
    loaded = template.load_template(key, source, wanted.job.tokenizer)
    return Chat(
        key, ConversationReader(open_rows(key, source, wanted), loaded, wanted.tokenizer, source.train_on), wanted, seed
    )


def place_of_rows(key: str, source: schema.Source, split: str) -> tuple[str, str | None]:
    """Return the key that names the files of a split, and its value."""
    if source.name == "embedded_chat":
        return f"{key}.name", str(Path(__file__).parent / "assets" / f"{split}.jsonl")
    return files.path_of(key, source, split)


def open_rows(key: str, source: schema.Source, wanted: Wanted) -> Records | HubRecords:
    """Open the files, or the dataset, of a split. Raises ConfigError if there is no row in them."""
    rows: Records | HubRecords
    dataset = of_hub(key, source, wanted.split)
    if dataset is not None:
        rows, where = dataset, f"{key}.path={dataset.where}"
    else:
        named, path = place_of_rows(key, source, wanted.split)
        rows, where = Records(files.require(named, path, SUFFIXES), wanted.bad), f"{named}={path}"
    if not len(rows):
        raise ConfigError(f"{where}: no row in it")
    return rows


def of_hub(key: str, source: schema.Source, split: str) -> HubRecords | None:
    """Return the rows of a dataset; None if `path` names files."""
    if not (isinstance(source, RowSource) and source.hub_split):
        return None
    name = source.hub_split if split == "train" else source.hub_validation_split
    if not name or not source.path:
        raise ConfigError(f"{key}.{'path' if name else 'hub_validation_split'}=null: data={source.name} needs it")
    return HubRecords(f"{key}.path", source.path, source.hub_subset, name)


def faults(key: str, source: ConversationSource, job: schema.Job) -> Iterator[Fault]:
    """Apply the template to the first conversation, and yield what is wrong with either of them. Imports no torch."""
    return faults_of_first(key, source, job, "conversation", _texts)


def warnings_of_chat(key: str, source: ConversationSource, job: schema.Job) -> Iterator[Fault]:
    """Yield a warning about text that the tokenizer encodes as unknown tokens."""
    return warnings_of_first(key, source, job, _texts)


def _texts(loaded: template.Template, source: ConversationSource, line: Record) -> list[Rendered]:
    conversation = parse(line)
    return [(conversation, *loaded.spans(conversation, source.train_on))]


Rendered = tuple[Conversation, str, template.Spans]
Texts = Callable[[template.Template, Any, Record], list[Rendered]]


def faults_of_first(key: str, source: TemplateSource, job: schema.Job, noun: str, texts: Texts) -> Iterator[Fault]:
    """Yield what is wrong with the template, or with the first rows. `noun` is the word for a row in messages, and
    `texts` applies the template to a row.
    """
    value, refused = source.chat_template, list[str]()

    def read(lines: Records | HubRecords) -> Iterator[str | BadRow]:
        """Yield the texts of the first rows, or BadRow for a row that the template cannot print."""
        for number in range(min(len(lines), unknown.ROWS)):
            where = f"row {number + 1}"
            try:
                where, line = lines.row(number)
                for _, text, _ in texts(loaded, source, line):
                    if not number:
                        _refuse_unknown_marks(key, source, job, loaded, text)
                    yield text
            except BadRow as error:
                yield error
            except ValueError as error:
                yield BadRow(where, error)
            except ConfigError as error:
                refused.append(str(error))
                return

    try:
        loaded = template.load_template(key, source, job.tokenizer)
        with template.time_limit(TRIED):
            faults_found = list(faults_of_rows(key, source, job, read))
        yield from faults_found if not refused else ()
    except template.TookTooLong:
        refused.append(f"it has not ended after {TRIED} s on the first {noun}; does it loop for ever?")
    except ConfigError as error:
        refused.append(str(error))
    for reason in refused[:1]:
        yield Fault(f"{key}.chat_template", value, reason.removeprefix(f"{key}.chat_template={value}: "))


def faults_of_rows(
    key: str, source: schema.Source, job: schema.Job, read: Callable[[Any], Iterator[Any]]
) -> Iterator[Fault]:
    """Yield what is wrong with the first rows of a source. A dataset that is not in a local folder is not read here."""
    if isinstance(source, RowSource) and source.hub_split:
        if source.path and home(source.path).is_dir():
            try:
                rows = of_hub(key, source, "train")
            except ConfigError as error:
                yield Fault(f"{key}.path", source.path, str(error))
            else:
                yield from faults_in_rows(f"{key}.path", source.path, job, lambda: read(rows))
        return
    where, path = place_of_rows(key, source, "train")
    yield from faults_in_files(where, path, job, SUFFIXES, lambda file: read(_first(file)))


def _first(file: Path) -> Records:
    return Records([file], BadShards(), unknown.ROWS)


def _refuse_unknown_marks(
    key: str, source: TemplateSource, job: schema.Job, loaded: template.Template, text: str
) -> None:
    """Raise ConfigError if the tokenizer does not know a mark of the template (such as `<|im_end|>`). Otherwise mostly
    unknown tokens would be learned.
    """
    if job.tokenizer.name != "hf":
        return  # a tokenizer of bytes encodes any text
    try:
        known = unknown.tokenizer_at(job.tokenizer.path or "")
    except ConfigError:
        return  # another rule yields this fault
    for mark in dict.fromkeys(MARK.findall(loaded.source)):
        if mark in known.special or mark not in text:
            continue
        if count := [token == known.unknown for token in known.locate(mark).ids].count(True):
            raise ConfigError(
                f"{key}.chat_template={source.chat_template}: its {mark} is {counted(count, 'unknown token')} of "
                f"{job.tokenizer.path}; take a template whose marks the tokenizer has, or add them to it"
            )


def warnings_of_first(key: str, source: TemplateSource, job: schema.Job, texts: Texts) -> Iterator[Fault]:
    """Yield warnings about the first rows: text that the tokenizer encodes as unknown tokens, answers whose end is not
    learned, and reasoning that the template leaves out. Unusable rows are skipped.
    """

    def of_file(file: Path) -> Iterator[Rendered]:
        lines = _first(file)
        for number in range(len(lines)):
            with contextlib.suppress(ValueError, BadRow):
                yield from texts(loaded, source, lines.row(number)[1])

    where, path = place_of_rows(key, source, "train")
    try:
        loaded = template.load_template(key, source, job.tokenizer)
        of_data = tokenizer.load(job.tokenizer)
        warnings_of_texts = [] if of_hub_named(source) else [*unknown.of_some(path, SUFFIXES, of_file)]
    except Exception:  # files and templates can be wrong in any way, which other rules report
        return
    yield from unknown.warning(where, path, job.tokenizer, lambda: (text for _, text, _ in warnings_of_texts))
    value = source.chat_template
    if (
        reason := warnings_of_texts
        and getattr(source, "train_on", "last") != "all"
        and _unlearned_end(*warnings_of_texts[0][1:], of_data)
    ):
        yield Fault(f"{key}.chat_template", value, reason)
    if lost := sum(forgotten(conversation, text) > 0 for conversation, text, _ in warnings_of_texts):
        reason = (
            f"it leaves out the reasoning of earlier answers, in {lost} of the first {len(warnings_of_texts)} rows; "
            "the answers behind it are learned without it"
        )
        yield Fault(f"{key}.chat_template", value, reason)


def of_hub_named(source: schema.Source) -> bool:
    """Whether the rows are those of a dataset, and not of files."""
    return isinstance(source, RowSource) and bool(source.hub_split)


def _unlearned_end(text: str, spans: template.Spans, of_data: Tokenizer) -> str | None:
    """Return why a model would not learn where its answer ends; None if the last learned token is a special one."""
    located, end = of_data.locate(text), spans[-1][1]
    learned = [token for token, begin in zip(located.ids, located.begins, strict=True) if begin < end]
    if learned and learned[-1] in {of_data.eos_id, *of_data.special.values()}:
        return None
    behind = next((name for name in of_data.special if text[end:].lstrip().startswith(name)), None)
    what = f"{behind} behind them is not learned" if behind else "no special token ends them"
    return f"answers are learned without their end, so that the model will not learn to stop: {what}"
