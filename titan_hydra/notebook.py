"""The functions of `import titan_hydra as th`, for a notebook or a script: docs/notebook.md.

What composes or trains runs in a process of its own, as Hydra and torch keep state for a whole process. What only reads
run directories runs in the caller's process.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Thread
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from titan_hydra.core.base.errors import ConfigError, Exit, RunError
from titan_hydra.core.base.text import all_printed
from titan_hydra.core.job.config.fault import did_you_mean, suggest
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.records import flat
from titan_hydra.experiments.report import compare, write
from titan_hydra.experiments.report.cells import ReportCell
from titan_hydra.experiments.report.command_report import report_of
from titan_hydra.experiments.report.table import Report
from titan_hydra.experiments.runs.find import RunCell, run_cell
from titan_hydra.experiments.runs.view import choose, look

if TYPE_CHECKING:
    import numpy
    import pandas
    from matplotlib.figure import Figure

Words = str | Sequence[str]  # a command line: one text, or its words
OPTIONS = ("--config-dir", "-cd")  # the options of `titan plan` that `plan` takes


class StepCurve(NamedTuple):
    """The values of one recorded column by step, in ascending order."""

    steps: numpy.ndarray
    values: numpy.ndarray


class _Row(Protocol):
    def as_dict(self) -> dict[str, Any]: ...


Entry = TypeVar("Entry", bound=_Row)


class Frame(list[Entry]):
    """A list of dataclasses of one class, which can become a table of pandas."""

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with a column for each field, and one for each varied key. pandas must be installed."""
        import pandas

        return pandas.DataFrame([row.as_dict() for row in self])


@dataclass(frozen=True)
class _OneRun:
    """What rows about one run have in common."""

    name: str
    directory: Path
    state: str  # done, running, queued, failed, interrupted, ...; in a report also the class of a failure
    reason: str | None  # why the run failed, or what is damaged
    varied: dict[str, Any]  # the keys and groups that the rows vary, with this row's values

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, with a field for each varied key in place of `varied`."""
        values = {column.name: getattr(self, column.name) for column in fields(self) if column.name != "varied"}
        return {"name": values.pop("name")} | self.varied | values

    def curve(self, column: str = "loss") -> StepCurve:
        """Return a column of metrics.jsonl or, if it has none of this name, of events.jsonl, such as validation_loss.
        Raises ConfigError if there is none.
        """
        import numpy

        known: set[str] = set()
        for file in (layout.METRICS, layout.EVENTS):
            rows, _ = file.rows(self.directory)
            by_step = {row["step"]: row[column] for row in rows if "step" in row and _is_number(row.get(column))}
            if by_step:
                return StepCurve(
                    numpy.array(sorted(by_step)), numpy.array([float(by_step[step]) for step in sorted(by_step)])
                )
            known |= {name for row in rows for name, value in row.items() if _is_number(value)}
        hint = did_you_mean(
            suggest(column, sorted(known)), otherwise=f"; there are {', '.join(sorted(known)) or 'none'}"
        )
        raise ConfigError(f"{self.directory.name}: no row has a number called {column!r}{hint}")


@dataclass(frozen=True)
class RunInfo(_OneRun):
    """A run as `titan status` shows it. What is None is unknown."""

    step: int | None
    steps: int | None
    tokens_per_second: float | None
    loss: float | None
    seconds: float | None
    where: str | None


@dataclass(frozen=True)
class ComparedRun(_OneRun):
    """A run compared with the baseline, with the numbers of `titan report --json`. What is None is unknown."""

    baseline: bool
    tokens_per_second: float | None
    tokens_per_second_iqr: float | None
    measured_steps: int | None
    difference: float | None
    noise: float | None
    doubt: str
    goodput: float | None
    memory_gib: float | None
    held_out_loss: float | None
    lowest_held_out_loss: float | None
    mean_loss: float | None
    loss_difference: float | None
    loss_difference_error: float | None
    loss_in_band: str | None
    in_band: bool | None
    mfu: float | None
    parameters: int | None
    tokens: int | None
    gpus: int | None
    commit: str | None
    torch: str | None
    device: str | None


@dataclass(frozen=True)
class Comparison:
    """A report: its rows, and what stands around the table."""

    name: str
    caption: str
    notes: list[str]
    rows: Frame[ComparedRun]
    _report: Report = field(repr=False)

    def to_pandas(self) -> pandas.DataFrame:
        """Return a DataFrame with all columns of `titan report --csv`, one for each varied key among them."""
        import pandas

        return pandas.DataFrame(write.values_of_rows(self._report))

    def figures(self, x: str = "step", log: bool = False) -> dict[str, Figure]:
        """Return the figures of `titan report --plots` by name. `x` is step, tokens or seconds; `log`: losses on a
        logarithmic scale.
        """
        from titan_hydra.experiments.report import charts, plots

        if x not in charts.AXES:
            raise ConfigError(f"x={x}: is one of {', '.join(charts.AXES)}")
        return dict(plots.figures(self._report, x, log))


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that `titan plan` predicts. `document` has all that `titan plan --json` says of it."""

    overrides: str
    front: bool  # whether no faster layout takes less memory
    fits: str
    memory_gib: float
    tokens_per_second: float | None
    step_seconds: float | None
    gpu_hours: float | None
    gpus: int
    hardware: str
    document: dict[str, Any] = field(repr=False)

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, without `document`."""
        return {column.name: getattr(self, column.name) for column in fields(self) if column.name != "document"}


def runs(target: str | Path | None = None, folder: str | Path = "runs") -> Frame[RunInfo]:
    """Return the runs that `titan status TARGET --runs FOLDER` shows: of a sweep, a folder, a name, or the start of a hash;
    by default of the newest sweep in `folder` or, if there is none, all. Raises ConfigError if there are none.
    """
    return _runs_of(choose(None if target is None else str(target), Path(folder)).cells)


def report(
    target: str | Path | None = None,
    folder: str | Path = "runs",
    *,
    baseline: str | None = None,
    allow: Sequence[str] = (),
    over: str | None = None,
) -> Comparison:
    """Compare runs as `titan report TARGET --runs FOLDER` does, with its options. Raises ConfigError if there are none, or
    if they cannot be compared.
    """
    compared = report_of(None if target is None else str(target), Path(folder), baseline, {*allow}, over)
    document = write.report_document(compared)
    rows = Frame[ComparedRun]()
    for row, values in zip(compared.rows, document["rows"], strict=True):
        known_values = {column.name: values[column.name] for column in fields(ComparedRun) if column.name in values}
        run_values = {
            "name": row.label,
            "directory": row.cell.directory,
            "varied": {key: values[key] for key in document["varied"]},
        }
        rows.append(ComparedRun(**known_values | run_values))
    return Comparison(compared.name, compared.caption, compared.notes, rows, compared)


def plan(overrides: Words) -> Frame[PlannedLayout]:
    """Return the layouts that `titan plan` predicts for a job, the fastest first; if none fits, those that need least
    memory. Raises ConfigError with the lines of its faults.
    """
    words = _words(overrides)
    if options := [word for word in words if word.startswith("-") and not word.startswith(OPTIONS)]:
        raise ConfigError(
            f"{options[0]}: plan takes KEY=VALUE words and --config-dir; `titan plan` has the other options"
        )
    done = subprocess.run(
        [sys.executable, "-m", "titan_hydra.cli", "plan", *words, "--json"], capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise _error(done.returncode, done.stderr)
    names = [column.name for column in fields(PlannedLayout) if column.name != "document"]
    return Frame(PlannedLayout(**{name: row[name] for name in names}, document=row) for row in json.loads(done.stdout))


def launch(overrides: Words = ()) -> Frame[RunInfo]:
    """Run the command line `python launch.py OVERRIDES` of this folder, print what it prints, and return its runs in the
    state in which it leaves them: ended if it waits for them, queued if a cluster has them. An interrupt is its Ctrl-C.

    Raises ConfigError with the lines of all faults if nothing was started.
    """
    with tempfile.TemporaryDirectory() as folder:
        begun = Path(folder) / "runs.json"
        child = "import sys; from titan_hydra.notebook import run_line; sys.exit(run_line(sys.argv.pop(1)))"
        process = subprocess.Popen(
            [sys.executable, "-c", child, str(begun), *_words(overrides)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that an interrupt reaches it once, whoever sends it
        )
        with process:  # closes its pipes
            status, errors = _followed(process, begun.exists)
        if not begun.exists() and status:
            raise _error(status, errors)
        directories = json.loads(begun.read_text()) if begun.exists() else []
    return _runs_of([run_cell(Path(directory)) for directory in directories])


def run_line(begun: str) -> int:
    """Run launch.py's command line in this process, as the child of `launch`. Once all cells have passed the checks, write
    their run directories to the file `begun`.
    """
    from titan_hydra.experiments.launch.main import main

    def note(directories: list[Path]) -> None:
        Path(f"{begun}.new").write_text(json.dumps([str(directory.absolute()) for directory in directories]))
        Path(f"{begun}.new").rename(begun)

    return all_printed(main(Path.cwd() / "launch.py", note))


def _followed(process: subprocess.Popen[str], live: Callable[[], bool]) -> tuple[int, str]:
    """Print what a process prints until it ends. Return its exit status, and what it has printed on stderr before `live`
    was true, which is not printed: it becomes an exception, or is printed at the end.
    """
    kept: list[str] = []

    def errors(stream: IO[str]) -> None:
        for line in stream:
            if live():
                print(*kept, line, sep="", end="", file=sys.stderr)
                kept.clear()
            else:
                kept.append(line)

    thread = Thread(target=errors, args=(process.stderr,), daemon=True)
    thread.start()
    lines: Iterator[str] = iter(process.stdout)
    while True:
        try:
            for line in lines:
                print(line, end="", flush=True)
            status = process.wait()
            break
        except KeyboardInterrupt:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGINT)
    thread.join()
    if live() or not status:
        print(*kept, sep="", end="", file=sys.stderr)
    return status, "".join(kept)


def _runs_of(cells: list[RunCell]) -> Frame[RunInfo]:
    rows, _ = look(cells)
    configured = [
        ReportCell(cell.name, cell.directory, cell.overrides, row.state, flat(layout.CONFIG.read(cell.directory)))
        for cell, row in zip(cells, rows, strict=True)
    ]
    varied = compare.varied(configured)
    return Frame(
        RunInfo(
            row.cell,
            row.directory,
            row.state.kind,
            row.state.failure.line if row.state.failure else row.state.damage or None,
            {key: values[number] for key, values in varied.items()},
            row.step,
            row.steps,
            row.tokens_per_second,
            row.loss,
            row.seconds,
            row.where,
        )
        for number, row in enumerate(rows)
    )


def _words(line: Words) -> list[str]:
    return shlex.split(line) if isinstance(line, str) else [*line]


def _error(status: int, text: str) -> RunError:
    """Return the exception for a command that ended with an exit status: its lines, or for a bug its traceback."""
    return (ConfigError if status == Exit.CONFIG else RunError)(text.strip() or f"exit status {status}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
