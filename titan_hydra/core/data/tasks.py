"""Tasks with which a run is evaluated (validation.tasks): a file's questions, the tokens that are scored for them, and
the numbers that follow from the scores. Prompts, tokens and numbers are those of lm-eval. Imports no torch.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean, stdev

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.files import home, similar
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.config.schema import Tokenizer as TokenizerKeys

from .files import UNREADABLE, opened, record_of
from .learned import tokenizer_of_data
from .tokenizer import Tokenizer, load

DELIMITER = " "  # text between a prompt and a choice; as in lm-eval, there is no text between a prompt and a target
MOST_NATS = math.log(sys.float_info.max)  # exp() of more is no float
FIELDS = {"prompt": str, "choices": list, "gold": int, "target": str, "target_delimiter": str}


@dataclass(frozen=True)
class TaskQuestion:
    """A row of a task's file. `gold` is the index of the right choice. If the row has a target instead of choices, the
    target is the only choice, and `gold` is None.
    """

    line: int
    prompt: str
    choices: tuple[str, ...]
    gold: int | None
    delimiter: str = DELIMITER


@dataclass(frozen=True)
class Request:
    """Tokens, of which the first `given` are the prompt, and all others are scored."""

    ids: list[int]
    given: int

    @property
    def length(self) -> int:
        """The number of tokens that the model reads: the last token is only predicted."""
        return len(self.ids) - 1


@dataclass(frozen=True)
class Task:
    """A task's questions, and a request for each of their choices, in order."""

    name: str
    questions: list[TaskQuestion]
    requests: list[Request] = field(repr=False)

    def results(self, scores: Sequence[tuple[float, bool]]) -> dict[str, float | int]:
        """Return the task's numbers. The score of a request is a pair: the log-probability of its scored tokens, and
        whether each of these tokens is the likeliest. A number that cannot be represented, or follows from a score that
        is not a number, is NaN: an evaluation never ends a run.
        """
        rest, right, normed, by_bytes = iter(scores), [], [], []
        chosen = self.questions[0].gold is not None
        nats = []
        for question in self.questions:
            of_question = [next(rest) for _ in question.choices]
            if not chosen:
                nats.append(of_question[0][0])
                right.append(of_question[0][1])
                continue
            logs = [log for log, _ in of_question]
            right.append(_first_best(logs) == question.gold)
            for hits, size in ((normed, len), (by_bytes, lambda choice: len(choice.encode()))):
                lengths = map(size, question.choices)
                hits.append(_first_best([log / n for log, n in zip(logs, lengths, strict=True)]) == question.gold)
        numbers = {"acc": fmean(right), "acc_stderr": _error(right)}
        if chosen:
            numbers |= {"acc_norm": fmean(normed), "acc_norm_stderr": _error(normed), "acc_bytes": fmean(by_bytes)}
        else:
            numbers |= {"nats": (mean := -fmean(nats)), "perplexity": math.exp(mean) if mean < MOST_NATS else math.nan}
        if any(math.isnan(log) for log, _ in scores):
            numbers = dict.fromkeys(numbers, math.nan)
        return {"questions": len(self.questions)} | numbers


def load_tasks(job: Job) -> list[Task]:
    """Read the tasks of a job. Raises ConfigError, with file and line, if a file cannot be evaluated: it may have changed
    since the job was checked, and no row may end the run at a validation.
    """
    if wrong := next(faults(job), None):
        raise wrong.error
    tokenizer = tokenizer_of_data(job)
    loaded = []
    for path in job.validation.tasks:
        questions = read_questions(home(path))
        loaded.append(
            Task(
                task_name(path),
                questions,
                [request for question in questions for request in requests_of(question, tokenizer)],
            )
        )
    return loaded


def faults(job: Job) -> Iterator[Fault]:
    """Yield a fault for each file of validation.tasks that cannot be evaluated."""
    try:
        if job.validation.tasks:
            tokenizer_of_data(job)
    except ConfigError as error:
        yield fault_at(job, "validation.tasks", str(error))
        return
    names = [task_name(path) for path in job.validation.tasks]
    for path, name in zip(job.validation.tasks, names, strict=True):
        if names.count(name) > 1:
            yield Fault("validation.tasks", path, f"two tasks would have the name {name}, which is the file's")
        elif not home(path).is_file():
            yield Fault("validation.tasks", path, "no such file", legal=similar(path))
        elif why := _objection(home(path), _stamp(home(path)), _keys(job.tokenizer), job.data.seq_len):
            yield Fault("validation.tasks", path, why)


def task_name(path: str) -> str:
    """Return the name of a task: that of its file, without suffixes."""
    return Path(path).name.partition(".")[0]


def read_questions(file: Path) -> list[TaskQuestion]:
    """Read a task's file, which is JSONL (also .gz or .zst). Raises ConfigError, with file and line."""
    questions: list[TaskQuestion] = []
    try:
        with opened(file) as stream:
            for line, text in enumerate(stream, 1):
                if text.strip():
                    questions.append(_question(text, line, f"{file}:{line}"))
                    if (questions[-1].gold is None) != (questions[0].gold is None):
                        raise ConfigError(f"{file}:{line}: some rows have choices, and others a target")
    except UNREADABLE as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from error
    if not questions:
        raise ConfigError(f"{file}: no question in it")
    return questions


def requests_of(question: TaskQuestion, tokenizer: Tokenizer) -> list[Request]:
    """Return a request for each choice: the tokens of the prompt, then those of the choice. As in lm-eval, blanks at
    the end of the prompt belong to the choice. The prompt is encoded without the choice, into n tokens. The choice's
    tokens are those after the first n when prompt and choice are encoded as one text.
    """
    first = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompt = question.prompt.rstrip()
    blanks = question.prompt[len(prompt) :]
    requests = []
    for choice in question.choices:
        if not question.prompt:  # without a begin-of-text, end-of-text comes before the text
            ids, given = [*(first or [tokenizer.eos_id]), *tokenizer.encode(question.delimiter + choice)], 1
        else:
            alone = first + tokenizer.encode(prompt)
            given = len(alone)
            ids = alone + [*first, *tokenizer.encode(prompt + blanks + question.delimiter + choice)][given:]
        requests.append(Request(ids, given))
    return requests


def _question(text: bytes, line: int, where: str) -> TaskQuestion:
    """Read a row of a task's file. Raises ConfigError with `where` if a field is missing or has a wrong value."""
    try:
        row = record_of(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    needed = ("prompt", "choices", "gold") if "choices" in row or "gold" in row else ("prompt", "target")
    if missing := [name for name in needed if name not in row]:
        raise ConfigError(
            f"{where}: no field {' and '.join(missing)}; a row has prompt, choices and gold, or prompt and target"
        )
    for name, kind in FIELDS.items():
        if name in row and (not isinstance(row[name], kind) or isinstance(row[name], bool)):
            raise ConfigError(f"{where}: {name} is {type(row[name]).__name__}, not {kind.__name__}")
    choices = row.get("choices", [row.get("target")])
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise ConfigError(f"{where}: each choice, and a target, is a text that is not empty")
    try:
        "".join((row["prompt"], *choices, row.get("target_delimiter", ""))).encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{where}: a text has half a surrogate pair, which is no character: {error}") from error
    if "choices" in row and not 0 <= row["gold"] < len(choices):
        raise ConfigError(f"{where}: gold is {row['gold']}, and there are {len(choices)} choices, counted from 0")
    delimiter = row.get("target_delimiter", DELIMITER if "choices" in row else "")
    return TaskQuestion(line, row["prompt"], tuple(choices), row.get("gold"), delimiter)


def _stamp(file: Path) -> tuple[int, int]:
    return file.stat().st_mtime_ns, file.stat().st_size


def _keys(keys: TokenizerKeys) -> tuple[str, str | None]:
    return keys.name, keys.path


@cache
def _objection(file: Path, stamp: tuple[int, int], keys: tuple[str, str | None], seq_len: int) -> str | None:
    """Return why a task's file cannot be evaluated; None if it can. The result is cached for the cells of a sweep."""
    try:
        tokenizer = load(TokenizerKeys(*keys))
        for question in read_questions(file):
            for choice, request in zip(question.choices, requests_of(question, tokenizer), strict=True):
                where = f"{file}:{question.line}"
                if request.length > seq_len:
                    return f"{where}: prompt and choice have {request.length} tokens, more than data.seq_len={seq_len}"
                if not 0 < request.given < len(request.ids):
                    return f"{where}: no token is left to score for {choice!r}, as the prompt alone has as many"
    except ConfigError as error:
        return str(error)
    return None


def _first_best(values: Sequence[float]) -> int:
    """Return the index of the largest value; of the first one if several are equal, like numpy's argmax."""
    return max(range(len(values)), key=values.__getitem__)


def _error(values: Sequence[bool]) -> float:
    """Return the standard error of a mean; 0 for a single value."""
    return stdev(map(float, values)) / math.sqrt(len(values)) if len(values) > 1 else 0.0
