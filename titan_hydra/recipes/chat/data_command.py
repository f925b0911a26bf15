"""`titan data show`: show which tokens of packed rows a run would learn."""

import argparse
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import COLOURS, coloured, table
from titan_hydra.core.data import Wanted
from titan_hydra.core.data.shards import BadShard, BadShards
from titan_hydra.core.data.unknown import share_of_unknown
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.fault import bad_value, fault_at
from titan_hydra.core.job.config.registry import DATA_SOURCES, resolve
from titan_hydra.core.job.config.source import data_sources
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.job.rules.data import sources_find_little_wrong
from titan_hydra.experiments.compose.compose import compose_unchecked

from .rows import WINDOW, Chat, ConversationReader, Turns, first_fit

BAR = 40  # number of characters of a histogram's longest bar
SHOWN = 5  # maximum number of unusable rows that are printed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="the job, as for launch.py: data=chat data.path=..."
    )
    parser.add_argument(
        "--config-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder with your own options, as for launch.py",
    )
    parser.add_argument("--row", type=int, default=1, metavar="N", help="number of the row to show (default: 1)")
    parser.add_argument(
        "--split", choices=("train", "validation"), default="train", help="split whose rows are shown (default: train)"
    )


def main(args: argparse.Namespace) -> int:
    """Print one row and a summary of all rows, for each source of the job that packs rows into samples."""
    job = freeze(compose_unchecked(*args.overrides, config_dir=args.config_dir))
    shown = [name for name, record in DATA_SOURCES.items() if "trained" in record.gives]
    sources = {key: source for key, source in data_sources(job.data).items() if source.name in shown}
    if not sources:
        reason = "only sources that pack rows into samples can be shown"
        raise fault_at(job, "data.name", reason, *tuple(shown)).error
    job.data.max_bad_rows = 2**31 - 1  # those that cannot be used are shown
    if faults := check(job):
        raise ConfigError("\n".join(map(str, faults)))
    wanted = Wanted(
        job, args.split, range(0), job.data.global_batch, BadShards(job.data.max_bad_shards, job.data.max_bad_rows)
    )
    for key, source in sources.items():
        _show(resolve(DATA_SOURCES[source.name].build)(key, source, wanted, job.seed), job, args.row)
    for warning in sources_find_little_wrong(job):
        print(f"\nwarning: {warning}")
    return Exit.DONE


def _show(samples: Chat, job: Job, row: int) -> None:
    """Print one row and the summary of one source."""
    reader = samples.reader
    if not 1 <= row <= len(reader.lines):
        nearest = (max(1, min(row, len(reader.lines))),)
        raise bad_value("--row", row, f"there are {len(reader.lines):,} {reader.rows}", *nearest)
    where = reader.lines.row(row - 1)[0]
    print(f"{where}: what is learned is {'green' if coloured() else 'between >>> and <<<'}")
    print(marked(reader, reader.turns(row - 1)), end="\n\n")
    turns, bad = [], []
    for number in range(len(reader.lines)):
        try:
            turns.append(reader.turns(number))
        except BadShard as error:
            bad.append(str(error))
    print(*_summary(job, samples, turns, bad), sep="\n")


def marked(reader: ConversationReader, turns: Turns) -> str:
    """Return the text of a row, with the learned part in green or between marks."""
    before, behind = (f"\x1b[{COLOURS['green']}m", "\x1b[0m") if coloured() else (">>>", "<<<")
    edges = [0, *(np.flatnonzero(np.diff(turns.trained)) + 1).tolist(), len(turns.tokens)]
    pieces = [(reader.text(turns, begin, end), turns.trained[begin]) for begin, end in pairwise(edges)]
    return "".join(f"{before}{text}{behind}" if trained else text for text, trained in pieces)


def _summary(job: Job, samples: Chat, turns: list[Turns], bad: list[str]) -> Iterator[str]:
    """Yield lines about all rows: their number, their lengths, the shares of learned tokens, and the number of samples
    that the rows fill.
    """
    data, size, rows = job.data, job.data.seq_len + 1, samples.reader.rows
    short = [row for row in turns if samples.takes(row)]
    long = f"{len(turns) - len(short):,} have more than {samples.limit}"
    yield f"{len(samples.reader.lines):,} {rows}: {len(bad):,} cannot be used, {long}"
    yield from (f"  {line}" for line in bad[:SHOWN])
    if not short:
        shortest = min((len(row.tokens) for row in turns), default=0)
        raise ConfigError(
            f"data.seq_len={data.seq_len}: none of the {rows} is left, the shortest has {shortest} tokens"
        )
    tokens, trained = (
        sum(counts) for counts in zip(*((len(row.tokens), int(row.trained.sum())) for row in short), strict=True)
    )
    windows = [short[begin : begin + WINDOW] for begin in range(0, len(short), WINDOW)]
    packed = sum(len(first_fit(window, samples.room)) for window in windows)
    unknown = sum(int((row.tokens == samples.reader.tokenizer.unknown).sum()) for row in short)
    yield f"{tokens:,} tokens, {trained / tokens:.1%} of them learned{share_of_unknown(unknown, tokens)}"
    steps = f"{packed / data.global_batch:,.1f} steps with data.global_batch={data.global_batch}"
    yield f"about {packed:,} samples an epoch, {tokens / packed / size:.1%} full: {steps}"
    columns = {unit: [row.size[unit] for row in turns] for unit in samples.room}
    columns["learned, %"] = [100 * row.trained.mean() for row in turns]
    for title, values in columns.items():
        yield from ("", *histogram(title, rows, np.array(values)))


def histogram(title: str, unit: str, values: np.ndarray) -> list[str]:
    """Return the lines of a histogram with ten bins."""
    counts, edges = np.histogram(values, bins=10)
    rows = [
        (
            f"{edges[bin_number]:,.0f} to {edges[bin_number + 1]:,.0f}",
            f"{count:,}",
            "#" * -(-BAR * count // counts.max()),
        )
        for bin_number, count in enumerate(counts)
    ]
    return table((title, unit, ""), rows, (title, unit))
