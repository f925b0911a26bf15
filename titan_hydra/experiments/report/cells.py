"""The cells of a report, each with a run's data. Rates and losses have the same form for finished and for running runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isfinite, sqrt
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from titan_hydra.core.base.errors import Kind
from titan_hydra.core.job.config.fault import as_typed
from titan_hydra.core.job.config.load import known_keys
from titan_hydra.core.job.run import layout, stragglers
from titan_hydra.core.job.run.records import flat
from titan_hydra.core.job.run.stretches import Stretch, goodput_of, stretches_of
from titan_hydra.experiments.compose.sweep import key_of
from titan_hydra.experiments.runs.find import RunCell, Selection
from titan_hydra.experiments.runs.rundir import State, inspect_all, shared_with
from titan_hydra.experiments.runs.view import short_names

from .columns import MetricColumn, columns_of

SHORT = {Kind.OUT_OF_MEMORY: "OOM"}  # shorter names for some classes of failure
FEW = 10  # minimum number of measured steps for a reliable rate
LAST, ROWS = 0.1, 5  # a mean loss is over the rows of the last tenth of the steps, but at least over the last 5 rows
BUSY = 1.25  # if the load per core is higher, other programs are assumed to share the machine


@dataclass(frozen=True)
class ReportCell:
    """The contents of one run directory. Files that are missing or unreadable count as empty."""

    name: str
    directory: Path
    overrides: list[str]
    state: State
    config: dict[str, Any] = field(default_factory=dict)  # dotted key: value
    env: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)  # result.json of a run that is done
    columns: dict[str, MetricColumn] = field(default_factory=dict)  # columns of metrics.jsonl; "step" has every step
    events: list[dict[str, Any]] = field(default_factory=list)  # rows of events.jsonl
    goodput: float | None = None  # time of useful steps divided by all time since the first start
    load: dict[str, float] = field(default_factory=dict)  # "cores" of the machine, load averages at "start" and "end"
    unreadable: tuple[str, ...] = ()  # damaged files and rows, which were left out
    beside: tuple[str, ...] = ()  # runs that used devices of the same machine at the same time
    repeat: bool = False  # whether this is the second run of the baseline, at the end of a packed sweep
    # only in a `Mean`: the averaged cells, by the value of the key in which they differ
    members: dict[str, ReportCell] = field(default_factory=dict)

    @property
    def single(self) -> list[ReportCell]:
        """The cells with a single run each: this cell itself or, for a `Mean`, its members."""
        return [*self.members.values()] or [self]

    @property
    def done(self) -> bool:
        return self.state.kind == "done"

    @property
    def word(self) -> str:
        """The state, or the class of failure: done, running, queued, OOM, hang, damaged, ..."""
        if self.state.failure:
            kind = self.state.failure.kind
            return "failed" if kind is Kind.UNKNOWN else SHORT.get(kind, str(kind))
        return {"new": "not started"}.get(self.state.kind, self.state.kind)

    unknown = word  # what stands in a table in place of a rate that the run does not have

    @property
    def waiting(self) -> bool:
        """Whether the run has never started, or was removed. A requeued run has started."""
        return self.state.kind in ("new", "removed", "not submitted", "queued") and not self.losses

    @cached_property
    def steady(self) -> list[float]:
        """Tokens per second of the logged rows. Left out are the first row (warm-up), profiled rows, and rows over
        fewer steps than the logging interval.
        """
        every, last = self.config.get("metrics.log_every") or 1, self.config.get("steps")
        profiled = self.column("profiled_steps")
        return [
            rate
            for step, rate in self.column("tokens_per_second", 1).items()
            if (step % every == 0 or step == last) and step not in profiled
        ]

    @property
    def lost(self) -> bool:  # failed, or damaged
        return bool(self.state.failure or self.state.damage)

    @property
    def partial(self) -> bool:
        """Whether the cell has numbers of a run that is not finished. A failed run has no numbers."""
        return not self.done and not self.state.failure and bool(self.steady)

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """The numbers of result.json. For an unfinished run they are computed from its rows, each of which is a mean
        over `metrics.log_every` steps.
        """
        if not self.partial:
            return self.result
        known = {name: self.column(name).values() for name in ("memory_reserved_gib", "mfu")}
        quarters = quantiles(self.steady, n=4) if len(self.steady) > 1 else None
        return {
            "tokens_per_second": median(self.steady),
            "tokens_per_second_iqr": quarters and quarters[2] - quarters[0],
            "measured_steps": len(self.steady),
            "memory_gib": max(known["memory_reserved_gib"], default=None),
            "mfu": median(known["mfu"]) if known["mfu"] else None,
        }

    rate = property(lambda self: self.numbers.get("tokens_per_second"))  # median over the steady steps, per device
    iqr = property(lambda self: self.numbers.get("tokens_per_second_iqr"))  # interquartile range of these rates
    noise = iqr  # rates that differ by less than this value are indistinguishable
    # number of steps (or rows) from which the median rate is computed
    measured = property(lambda self: self.numbers.get("measured_steps"))
    memory = property(lambda self: self.numbers.get("memory_gib"))  # peak GiB reserved, the largest over all ranks
    mfu = property(lambda self: self.numbers.get("mfu"))
    parameters = property(lambda self: self.result.get("parameters"))
    flops = property(lambda self: self.result.get("flops_per_token"))

    @property
    def tokens(self) -> int | None:
        seen = self.result.get("tokens") or self.column("tokens_seen").get(self.step)
        return None if seen is None else int(seen)

    @property
    def busy(self) -> bool:
        """Whether the machine's load was much higher than its number of cores: then other programs shared the machine."""
        return bool(self.load) and max(self.load.get("start", 0), self.load.get("end", 0)) > BUSY * self.load.get(
            "cores", 1
        )

    @cached_property
    def stretches(self) -> list[Stretch]:
        """The stretches of a run whose layout changed; empty for any other run."""
        moved = any(event["event"] == "layout" for event in self.events)
        return stretches_of(self.directory) if moved else []

    def column(self, name: str, first: int = 0) -> Mapping[int, float]:
        """Return a column of metrics.jsonl by step; with `first`, only rows of the newest layout, except its first row."""
        column = self.columns.get(name, MetricColumn())
        if not (first and column):
            return column
        began = self.stretches[-1].first - 1 if self.stretches else 0
        return column.after(next(iter(self.columns["step"].after(began)), began))

    @cached_property
    def losses(self) -> Mapping[int, float]:
        """The loss of each logged step."""
        return self.column("loss")

    @cached_property
    def means(self) -> Mapping[int, float]:
        """For each logged step, the mean loss since the row before. If a row has no mean, its loss is taken instead."""
        means = self.column("loss_mean")
        return means if len(means) == len(self.losses) else dict(self.losses) | dict(means)

    @cached_property
    def loss(self) -> float | None:
        """The mean loss over the last rows (LAST, ROWS), as the loss of a single step is noisy; None for a failed run."""
        if self.state.failure:
            return None
        return self.last_mean(self.means)

    def last_mean(self, column: Mapping[int, float]) -> float | None:
        """Return the mean over the last rows (LAST, ROWS) of a column."""
        last = [value for step, value in column.items() if step > (1 - LAST) * self.step]
        return mean(max(last, [*column.values()][-ROWS:], key=len))

    @cached_property
    def validation(self) -> dict[int, float]:
        """The held-out loss of each validated step."""
        return {
            event["step"]: event["validation_loss"]
            for event in self.events
            if event["event"] == "validation" and event.get("validation_loss") is not None
        }

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """The newest results of each evaluation task, by the task's name; {} for a failed run."""
        rows = [event for event in self.events if event["event"] == "task" and "task" in event]
        return {} if self.state.failure else {row["task"]: row for row in rows}

    @property
    def held_out(self) -> float | None:
        """The last held-out loss; None for a failed run."""
        if self.state.failure:
            return None
        if "validation_loss" in self.result:
            return self.result["validation_loss"]
        return ([*self.validation.values()] or [None])[-1]

    @property
    def lowest(self) -> tuple[float, int] | None:
        """The lowest held-out loss, with its step; None for a failed run."""
        losses = [(loss, step) for step, loss in self.validation.items() if isfinite(loss)]
        return min(losses) if losses and not self.state.failure else None

    @property
    def straggler(self) -> str | None:
        """A sentence about a rank that was slow in most rows of the newest attempt; None if there is none."""
        if not (steps := self.columns.get("step")):
            return None
        names = ("first_step", *stragglers.FIELDS)
        slow = stragglers.slow_rank({name: self.column(name).get(step) for name in names} for step in steps)
        return stragglers.straggler_line(slow, layout.ATTEMPT.of(self.directory, self.state.attempt)) if slow else None

    @property
    def step(self) -> int:
        """The last logged step."""
        return self.columns["step"].steps[-1] if self.columns.get("step") else 0

    def places(self, axis: str) -> dict[float, float]:
        """Return the position of each logged step on an x axis: `step`, `tokens` seen by the whole job, or `seconds` of
        training.
        """
        tokens = (self.config.get("data.global_batch") or 0) * (self.config.get("data.seq_len") or 0)
        coordinates: dict[float, float] = {}
        seconds, before = 0.0, 0
        durations, seen = self.column("step_seconds"), self.column("tokens_seen")
        for step in self.column("step"):
            seconds += durations.get(step, 0.0) * (step - before)
            before = step
            coordinates[step] = {"step": step, "tokens": seen.get(step) or tokens * step, "seconds": seconds}[axis]
        return coordinates

    def on(self, axis: str, steps: Sequence[float]) -> list[float]:
        """Convert steps to coordinates on an axis. The coordinate of an unlogged step is scaled from the last logged
        step.
        """
        coordinates = self.places(axis)
        last = coordinates[self.step] / self.step if self.step else 0.0
        return [coordinates.get(step, step * last) for step in steps]

    def experiment(self, *without: str) -> str:
        """Return a text that is equal for cells of the same experiment. It has the values of all keys, except the keys
        `without` and all keys that change neither the identity hash nor the samples of the held-out loss.
        """
        ignored = set(without)
        for key, spec in known_keys().items():
            if not spec.metadata["identity"] and spec.metadata["changes"] != "held-out loss":
                ignored.add(key)
        config = {key: value for key, value in self.config.items() if key not in ignored}
        files = {key: digest for key, digest in self.files.items() if key not in without}
        return json.dumps([config, files], sort_keys=True)

    @cached_property
    def files(self) -> dict[str, str]:
        """The digests of the files that the run has read, by key; after a change that was accepted, of all versions."""
        recorded = self.env.get("files") or {}
        earlier = [change for change in self.env.get("accepted") or [] if change["attempt"] is not None]
        return {
            key: " ".join([*(change["was"] for change in earlier if change["key"] == key), facts["digest"]])
            for key, facts in recorded.items()
        }

    @property
    def gpus(self) -> int | None:
        return self.result.get("world_size") or self.config.get("gpus")

    @property
    def commit(self) -> str | None:
        """The commit of the code that ran, followed by + if some files differed from the commit."""
        sha = self.result.get("git_sha") or self.env.get("git_sha")
        return sha and sha[:7] + ("+" if self.dirty else "")

    @property
    def dirty(self) -> bool:
        ours = [
            name
            for name in self.env.get("git_untracked") or []
            if name.startswith(("titan_hydra/", "conf/", "launch.py"))
        ]
        return bool(self.env.get("git_diff") or ours)

    @property
    def code(self) -> str | None:
        """The digest of the code that ran; for runs that have none, the commit and a hash of the uncommitted changes."""
        if digest := self.env.get("code"):
            return str(digest)
        diff = self.env.get("git_diff")
        return self.commit and self.commit + (hashlib.sha256(diff.encode()).hexdigest()[:6] if diff else "")

    def version(self, package: str) -> str | None:
        """Return a package's version in the run's own process or, if unknown, in the process that submitted the run."""
        return (self.result.get("versions") or self.env.get("versions") or {}).get(package)

    @property
    def device(self) -> str | None:
        return self.result.get("device")


@dataclass(frozen=True)
class Mean(ReportCell):
    """Cells that differ only in one key (such as the seed), combined into one cell. Its numbers are means, and its
    noise is the spread of the members.
    """

    def of(self, name: str) -> list[float]:
        """Return the values that an attribute has in the members, without None."""
        return [value for cell in self.members.values() if (value := getattr(cell, name)) is not None]

    rate = property(lambda self: mean(self.of("rate")))
    mfu = property(lambda self: mean(self.of("mfu")))
    loss = property(lambda self: mean(self.of("loss")))
    held_out = property(lambda self: mean(self.of("held_out")))
    measured = property(lambda self: min(self.of("measured"), default=None))
    memory = property(lambda self: max(self.of("memory"), default=None))
    partial = property(lambda self: any(self.of("partial")))
    busy = property(lambda self: any(self.of("busy")))
    iqr = None

    @property
    def noise(self) -> float | None:
        error = error_of(self.of("rate"))
        return None if error is None else 2 * error

    def column(self, name: str, first: int = 0) -> Mapping[int, float]:
        """Return, for each step that all members have logged, the mean of a column over the members."""
        return self._merged(lambda cell: cell.column(name, first), mean)

    @cached_property
    def validation(self) -> dict[int, float]:
        return self._merged(lambda cell: cell.validation, mean)

    @property
    def errors(self) -> dict[int, float]:
        """The standard error of the mean loss at each step; {} if there is only one member."""
        errors = self._merged(lambda cell: cell.means, error_of)
        return {} if None in errors.values() else errors

    def _merged(
        self, curve_of: Callable[[ReportCell], Mapping[int, float]], by: Callable[[list[float]], float | None]
    ) -> dict[int, float]:
        curves = [curve for cell in self.members.values() if not cell.state.failure and (curve := curve_of(cell))]
        steps = set.intersection(*map(set, curves)) if curves else set()
        return {step: by([curve[step] for curve in curves]) for step in sorted(steps)}


def mean(values: list[float]) -> float | None:
    """Return the mean of the values, which may be infinite or NaN; None for an empty list."""
    return sum(values) / len(values) if values else None


def error_of(values: list[float]) -> float | None:
    """Return the standard error of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    squares = [(value - mean(values)) * (value - mean(values)) for value in values]
    return sqrt(sum(squares) / (len(values) - 1) / len(values))


def gather(selection: Selection) -> list[ReportCell]:
    """Read the cells of a selection, each with its state now and whether it repeats the baseline."""
    repeats = [bool(entry.get("repeat")) for entry in selection.sweep.get("cells", [{}] * len(selection.cells))]
    now_of = inspect_all([chosen.directory for chosen in selection.cells])
    return [
        replace(read_cell(chosen, now), repeat=repeat)
        for chosen, now, repeat in zip(selection.cells, now_of, repeats, strict=False)
    ]


def read_cell(chosen: RunCell, now: State) -> ReportCell:
    """Read the files of a run. For a damaged run, the returned cell has no content."""
    cell = ReportCell(chosen.name, chosen.directory, chosen.overrides, now)
    if now.damage:
        return cell
    environment = layout.ENV.read(chosen.directory)
    rows, damaged = layout.METRICS.rows(chosen.directory)
    events, other = layout.EVENTS.rows(chosen.directory)
    rank = layout.RANK.read(layout.ATTEMPT.of(chosen.directory, now.attempt))
    unreadable = [
        f"rows of {file}: {count}"
        for file, count in ((layout.METRICS.name, damaged), (layout.EVENTS.name, other))
        if count
    ]
    if not environment and layout.ENV.of(chosen.directory).exists():
        unreadable.append(layout.ENV.name)
    result = layout.RESULT.read(chosen.directory) if now.kind == "done" else {}
    return replace(
        cell,
        config=flat(layout.CONFIG.read(chosen.directory)),
        env=environment,
        result=result,
        columns=columns_of(rows),
        events=events,
        goodput=result.get("goodput") if result or now.failure else goodput_of(chosen.directory, rows),
        load=rank.get("load") or {},
        beside=shared_with(chosen.directory),
        unreadable=tuple(unreadable),
    )


def averaged(cells: list[ReportCell], over: str) -> list[ReportCell]:
    """Replace each group of cells that differ only in the key `over` by one `Mean`."""
    groups: dict[str, list[ReportCell]] = {}
    for cell in cells:
        groups.setdefault(cell.experiment(over) if cell.config else cell.name, []).append(cell)
    return [mean_of(group, over) for group in groups.values()]


def mean_of(cells: list[ReportCell], over: str) -> Mean:
    """Build the `Mean` of a group of cells. Its name consists of the words that occur in the names of all cells."""
    first = ([cell for cell in cells if cell.done] or cells)[0]
    swept = (over, over.rpartition(".")[2])
    names = [" ".join(word for word in cell.name.split() if key_of(word) not in swept) for cell in cells]
    name = " ".join(common(names)) or (first.name if first.name == first.directory.name else f"over {over}")
    config = {key: value for key, value in first.config.items() if key != over}
    overrides = [override for override in first.overrides if key_of(override) != over]
    unreadable = tuple(f"{unread_file} ({cell.name})" for cell in cells for unread_file in cell.unreadable)
    return Mean(
        name,
        first.directory,
        overrides,
        first.state,
        config,
        first.env,
        first.result,
        first.columns,
        first.events,
        mean([cell.goodput for cell in cells if cell.goodput is not None]),
        first.load,
        unreadable,
        tuple(dict.fromkeys(name for cell in cells for name in cell.beside)),
        members={as_typed(cell.config.get(over)): cell for cell in cells},
    )


def labels(cells: list[ReportCell], sweep: bool) -> list[str]:
    """Return the cells' names without the words that occur in all names. In a sweep, only such words of the form
    `key=value` are left out, because users have chosen all other words.
    """
    if not sweep:
        return short_names([RunCell(cell.name, cell.directory, cell.overrides) for cell in cells])
    names = [cell.name for cell in cells]
    shared = {word for word in common(names) if "=" in word} if len(names) > 1 else set()
    return [" ".join(word for word in name.split() if word not in shared) or name for name in names]


def common(names: list[str]) -> Iterator[str]:
    """Yield the words that all names contain."""
    return (word for word in names[0].split() if all(word in name.split() for name in names))
