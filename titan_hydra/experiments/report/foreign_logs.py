"""Read the logs of other programs: TorchTitan's and Megatron-LM's lines, TensorBoard folders, CSV files and JSON lines.

Files are read line by line, so their size does not matter. Text may be of any encoding in which digits are ASCII (UTF-16
too), and may hold escape sequences and damaged places.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import json
import re
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError

from .columns import MetricColumn

Values = dict[str, float | None]
UNREADABLE = (OSError, EOFError, zlib.error)  # EOFError: a compressed file that is cut off
LONGEST = 1 << 20  # bytes of a line; what is behind them is read as another line
STEPS = 2**53  # larger numbers are no steps, and a float would round them
CLOCKED = ("tokens_per_second", "step_seconds")  # of the first row of an attempt, they include its start
# Names that programs give to columns and tags, in lower case, by our name.
NAMES = {
    "step": "step,_step,global_step,trainer/global_step,train/global_step,iteration,iter,iterations,train_step",
    "loss": "loss,train/loss,train_loss,training_loss,training loss,lm loss,lm_loss,train/lm_loss,train_loss_step,"
    "loss_metrics/global_avg_loss,global_avg_loss,reduced_train_loss,train/ce loss,train/ce_loss,train/crossentropyloss",
    "tokens_per_second": "tokens_per_second,tokens/s,tokens/sec,tok/s,tok/sec,tokens_per_sec,tps,wps,throughput(tps),"
    "train/tps,train/tokens_per_second,train/tokens_per_sec,tokens/s/gpu,tokens_per_second_per_device,"
    "tokens per gpu per second (tgs),tokens_per_second_per_gpu,throughput/device/tokens_per_sec,throughput/device/tps",
    "grad_norm": "grad_norm,grad-norm,grad norm,gradient_norm,train/grad_norm,optim/total_grad_norm",
    "lr": "lr,learning_rate,learning-rate,learning rate,train/learning_rate,train/lr,optim/lr",
    "memory_reserved_gib": "memory_reserved_gib,memory/max_reserved(gib)",
    "step_seconds": "step_seconds,iteration-time,time_metrics/end_to_end(s),step_time,train_step_timing in s",
    "samples": "batch-size,global batch size,global_batch_size",
    "validation_loss": "validation_loss,val_loss,val/loss,valid_loss,valid/loss,validation/loss,eval/loss,eval_loss,"
    "validation_metrics/loss,lm loss validation,lm-loss-validation/lm loss validation",
}
OURS = {name: own for own, names in NAMES.items() for name in names.split(",")}
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NUMBER = r"([-+]?(?:nan|inf(?:inity)?|\d[\d,]*\.?\d*(?:e[-+]?\d+)?))"
TITAN = re.compile(rf"(validate )?step:\s*(\d+)\b.*?loss:\s*{NUMBER}(.*)", re.IGNORECASE)
TITAN_PARTS = {
    name: re.compile(rf"\b{pattern}:\s*{NUMBER}", re.IGNORECASE)
    for name, pattern in (
        ("grad_norm", "grad_norm"),
        ("memory_reserved_gib", "memory"),
        ("tokens_per_second", "(?:tps|wps)"),
    )
}
TITAN_SIZE = re.compile(r"size:\s*([\d,]+) total parameters")
MEGATRON = re.compile(r"\biteration\s+(\d+)\s*/\s*(?:\d+|infinity)\s*\|(.*)")
MEGATRON_PART = re.compile(rf"^\s*(.+?)(?::\s*|\s+){NUMBER}\s*$", re.IGNORECASE)
MEGATRON_HELD_OUT = re.compile(
    rf"validation loss at iteration (\d+)( on test set)?\b.*?lm loss value:\s*{NUMBER}", re.IGNORECASE
)
MEGATRON_FACT = re.compile(r"\b(seq_length|world_size) \.{3,} (\d+)\s*$")
MEGATRON_MEMORY = re.compile(r"max reserved:\s*([\d.]+)")
RANK = re.compile(r"^\s*\[?(?:rank|default)(\d+)\]?:", re.IGNORECASE)


@dataclass
class ForeignLog:
    """What a file holds of one run: columns as (steps, values) in the file's order, and facts about the run."""

    program: str
    columns: dict[str, tuple[array[int], array[float]]] = field(default_factory=dict)
    facts: dict[str, int] = field(default_factory=dict)  # parameters, seq_len, gpus
    damage: list[str] = field(default_factory=list)  # what could not be read, for a note
    damaged_rows: int = 0

    def add(self, step: int, values: Values) -> None:
        """Add the values of a step; None is no value."""
        for name, value in values.items():
            if value is not None:
                steps, numbers = self.columns.setdefault(name, (array("q"), array("d")))
                steps.append(step)
                numbers.append(value)

    def settled(self, name: str) -> tuple[MetricColumn, int]:
        """Return a column by ascending step, and how often its steps went back. Then later values count, and what the
        attempt before had logged from that step on does not.
        """
        steps, values = self.columns.get(name, (array("q"), array("d")))
        if len(steps) > 2 and steps[0] > steps[-1] and all(a >= b for a, b in pairwise(steps)):
            steps, values = steps[::-1], values[::-1]  # a table with its newest row first
        ascending, numbers, back = array("q"), array("d"), 0
        for step, value in zip(steps, values, strict=True):
            if ascending and step <= ascending[-1]:
                again = step < ascending[-1]
                index = bisect_left(ascending, step)
                del ascending[index:], numbers[index:]
                if again:
                    back += 1
                    if name in CLOCKED:
                        continue
            ascending.append(step)
            numbers.append(value)
        return MetricColumn(ascending, numbers), back


def read_foreign(file: Path, columns: dict[str, str]) -> dict[str, ForeignLog]:
    """Read every run of a file or a folder, by the name that the file gives it ("" if it gives none). `columns` has the
    names of columns that the user states, by our name. Raises ConfigError if nothing of a run is in the file.
    """
    if file.is_dir() or ".tfevents." in file.name:
        return {"": _tensorboard(file)}
    if not file.is_file():
        from titan_hydra.core.job.config.fault import did_you_mean
        from titan_hydra.core.job.config.files import similar

        raise ConfigError(f"{file}: no such file{did_you_mean(similar(str(file)))}")
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if ".csv" in suffixes or ".tsv" in suffixes:
        return _csv(file, columns)
    if columns:
        raise ConfigError(f"{file}.yaml: {next(iter(columns))}_column: only a .csv or .tsv file has columns")
    return {"": _json_lines(file) if ".jsonl" in suffixes else _log(file)}


def _lines(file: Path, damage: list[str]) -> Iterator[str]:
    """Yield the lines of a text file. A last line without an end may be half of a line, and is left out."""
    try:
        with gzip.open(file) if file.suffix == ".gz" else file.open("rb") as stream:
            while line := stream.readline(LONGEST):
                text = line.decode("utf-8", "replace").replace("\0", "").lstrip("\ufeff\ufffd")
                if not line.endswith(b"\n") and len(line) < LONGEST:
                    if text.strip():
                        damage.append("its last line has no end, and is left out")
                    return
                yield from text.replace("\r\n", "\n").split("\r") if "\r" in text else (text,)
    except UNREADABLE as error:
        damage.append(f"cannot be read to its end: {getattr(error, 'strerror', None) or error}")


def number_in(text: Any) -> float | None:
    """Return the number that a text holds, in which commas may stand between thousands; None if it holds none."""
    if isinstance(text, bool):
        return None
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return float(text.strip().replace(",", "") if isinstance(text, str) else text)
    return None


def step_in(text: Any) -> int | None:
    """Return the step that a text holds; None if it holds none."""
    number = number_in(text)
    return int(number) if number is not None and 0 <= number < STEPS and number == int(number) else None


def _log(file: Path) -> ForeignLog:
    """Read the lines of TorchTitan or Megatron-LM. If lines name their rank, those of the first such rank count."""
    log, rank = ForeignLog(""), None
    for raw in _lines(file, log.damage):
        if not any(
            word in raw
            for word in ("step:", "iteration", "total parameters", "seq_length", "world_size", "max reserved")
        ):
            continue
        line = COLOUR.sub("", raw)
        named = RANK.match(line)
        if named and rank not in (None, named[1]):
            continue
        if _titan_line(line, log) or _megatron_line(line, log):
            rank = named[1] if named else rank
    if not log.columns:
        raise ConfigError(_nothing(file, log))
    return log


def _nothing(file: Path, log: ForeignLog) -> str:
    """Return the message for a file in which no row of a run was recognized."""
    if log.damage:
        return f"{file}: no row of a run: {log.damage[0]}"
    if not file.stat().st_size:
        return f"{file}: is empty"
    return (
        f"{file}: no row of a run: neither a line of TorchTitan (step: 1  loss: ...), nor one of Megatron-LM (iteration 1/ 9 | ... | "
        "lm loss: ...); a table is read from a .csv, .tsv or .jsonl file, or from a folder of TensorBoard"
    )


def _titan_line(line: str, log: ForeignLog) -> bool:
    """Add what a line of TorchTitan holds. Return whether it is one with numbers of a step."""
    if size := TITAN_SIZE.search(line):
        log.facts["parameters"] = int(size[1].replace(",", ""))
    match = TITAN.search(line)
    if not match or not TITAN_PARTS["tokens_per_second"].search(match[4]):
        return False
    log.program, step, loss = "TorchTitan", int(match[2]), number_in(match[3])
    if step >= STEPS:
        return False
    if match[1]:
        log.add(step, {"validation_loss": loss})
        return True
    parts = {name: number_in(part[1]) for name, pattern in TITAN_PARTS.items() if (part := pattern.search(match[4]))}
    log.add(step, {"loss": loss} | parts)
    return True


def _megatron_line(line: str, log: ForeignLog) -> bool:
    """Add what a line of Megatron-LM holds. Return whether it is one with numbers of an iteration."""
    if fact := MEGATRON_FACT.search(line):
        log.facts[{"seq_length": "seq_len", "world_size": "gpus"}[fact[1]]] = int(fact[2])
    if (memory := MEGATRON_MEMORY.search(line)) and "memory (MB)" in line:
        log.facts["memory_mib"] = max(log.facts.get("memory_mib", 0), round(float(memory[1])))
    if (held_out := MEGATRON_HELD_OUT.search(line)) and not held_out[2]:
        log.add(int(held_out[1]), {"validation_loss": number_in(held_out[3])})
        return True
    match = MEGATRON.search(line)
    if not match or int(match[1]) >= STEPS:
        return False
    parts = {part[1].lower(): number_in(part[2]) for text in match[2].split("|") if (part := MEGATRON_PART.match(text))}
    if not parts:
        return False
    log.program = "Megatron-LM"
    values = {column: parts[name] for name in parts if (column := OURS.get(name)) and column != "step"}
    for name, unit in (("elapsed time per iteration (ms)", 1e-3), ("elapsed time per iteration (s)", 1.0)):
        if (elapsed := parts.get(name)) is not None:
            values["step_seconds"] = elapsed * unit
    log.add(int(match[1]), values)
    return True


def _csv(file: Path, stated: dict[str, str]) -> dict[str, ForeignLog]:
    """Read a table with a line of names. A table that wandb exports from a panel holds several runs, each with columns
    "RUN - NAME".
    """
    damage: list[str] = []
    lines = (line for line in _lines(file, damage) if line.strip())
    head = next(lines, "")
    delimiter = max(",;\t", key=head.count)
    csv.field_size_limit(2**31 - 1)
    names = [name.strip() for name in next(csv.reader([head], delimiter=delimiter), [])]
    if not names:
        raise ConfigError(f"{file}: {f'no row of a run: {damage[0]}' if damage else 'is empty'}")
    columns = _places(file, names, stated)
    at = next(index for index, key in columns.items() if key == ("", "step"))
    runs = dict.fromkeys(run for run, column in columns.values() if column != "step")
    logs = {run: ForeignLog("CSV", damage=damage) for run in runs}
    for line in _rows(lines, delimiter):
        step = step_in(line[at]) if line and at < len(line) else None
        if step is None:
            for log in logs.values():
                log.damaged_rows += 1
            continue
        for index, (run, column) in columns.items():
            if column != "step" and index < len(line):
                logs[run].add(step, {column: number_in(line[index])})
    for run, log in logs.items():
        if not log.columns:
            raise ConfigError(f"{file}: no row of a run{f' {run}' if run else ''} has a step and a number")
    return logs


def _rows(lines: Iterator[str], delimiter: str) -> Iterator[list[str]]:
    """Yield the fields of each row; [] for one that is no CSV."""
    for line in lines:
        try:
            yield next(csv.reader([line], delimiter=delimiter), [])
        except csv.Error:
            yield []


def _places(file: Path, names: list[str], stated: dict[str, str]) -> dict[int, tuple[str, str]]:
    """Return for each column that is read (run, our name). Raises ConfigError if a column that is stated, the step, or any
    number is missing.
    """
    listed = ", ".join(names[:20]) + (", ..." if len(names) > 20 else "")
    for column, name in stated.items():
        if name not in names:
            raise ConfigError(f"{file}.yaml: {column}_column={name}: no such column in {file.name}; columns: {listed}")
    mine = {name: {"rate": "tokens_per_second"}.get(column, column) for column, name in stated.items()}
    columns: dict[int, tuple[str, str]] = {}
    for index, name in enumerate(names):
        run, _, metric = name.rpartition(" - ")
        column = mine.get(name) or OURS.get(metric.strip().lower())
        if column is None or metric.endswith(("__MIN", "__MAX")) or (column in mine.values() and name not in mine):
            continue
        key = ("" if column == "step" else run, column)
        if key not in columns.values():
            columns[index] = key
    if ("", "step") not in columns.values():
        raise ConfigError(f"{file}: no column of steps; columns: {listed}; name it as step_column in {file.name}.yaml")
    if not any(column in ("loss", "tokens_per_second", "validation_loss") for _, column in columns.values()):
        raise ConfigError(
            f"{file}: no column of losses or tokens/s; columns: {listed}; name it as loss_column or rate_column in {file.name}.yaml"
        )
    return columns


def _json_lines(file: Path) -> ForeignLog:
    """Read an object of each line, as `run.history()` of wandb gives them."""
    log = ForeignLog("JSON lines")
    for line in _lines(file, log.damage):
        row: Any = None
        with contextlib.suppress(ValueError, RecursionError):
            row = json.loads(line)
        values = (
            {OURS[name.lower()]: value for name, value in row.items() if name.lower() in OURS}
            if isinstance(row, dict)
            else {}
        )
        step = step_in(values.pop("step", None))
        if step is None:
            log.damaged_rows += bool(line.strip())
        else:
            log.add(step, {name: number_in(value) for name, value in values.items()})
    if not log.columns:
        raise ConfigError(_nothing(file, log))
    return log


def _tensorboard(folder: Path) -> ForeignLog:
    """Read the scalars of a folder of TensorBoard, or of one of its files, in the order in which the files began."""
    files = sorted(folder.rglob("*.tfevents.*"), key=_began) if folder.is_dir() else [folder]
    if not files:
        raise ConfigError(f"{folder}: no file of TensorBoard (*.tfevents.*) in it")
    homes = sorted({file.parent for file in files})
    if len(homes) > 1 and not all(re.fullmatch(r"\d{8}-\d{4,6}", home.name) for home in homes):
        names = ", ".join(str(home.relative_to(folder)) for home in homes[:6])
        raise ConfigError(
            f"{folder}: holds {len(homes)} runs, and one is needed: {names}{', ...' if len(homes) > 6 else ''}"
        )
    log = ForeignLog("TensorBoard")
    for file in files:
        _events(file, log)
    if not log.columns:
        raise ConfigError(f"{folder}: no scalar of a known name in it{f'; {log.damage[0]}' if log.damage else ''}")
    return log


def _began(file: Path) -> tuple[int, str]:
    """Return the time in the name of a file of TensorBoard."""
    time = re.search(r"\.tfevents\.(\d+)", file.name)
    return int(time[1]) if time else 0, str(file)


def _events(file: Path, log: ForeignLog) -> None:
    """Add the scalars of one file. What stands behind a damage is not read."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    from tensorboard.util.tensor_util import make_ndarray

    try:
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                column = OURS.get(value.tag.lower())
                if (
                    column not in (None, "step")
                    and value.WhichOneof("value") in ("simple_value", "tensor")
                    and event.step >= 0
                ):
                    simple = value.WhichOneof("value") == "simple_value"
                    with contextlib.suppress(ValueError, TypeError):
                        number = value.simple_value if simple else number_in(make_ndarray(value.tensor).item())
                        log.add(event.step, {column: number})
    except Exception as error:  # of protobuf and of tensorboard's reader, which have no common class
        log.damage.append(f"{file.name} cannot be read to its end: {' '.join(str(error).split())[:200]}")
