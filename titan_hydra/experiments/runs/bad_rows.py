"""Rows that a command leaves out: each is named on stderr, up to --max-bad-rows. Imports no torch."""

import argparse
import sys

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.shards import BadShard, BadShards
from titan_hydra.core.job.config.fault import counted


def add_max_bad_rows(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-bad-rows",
        type=int,
        default=0,
        metavar="N",
        help="number of rows that may be left out because they cannot be used, each with its file, line and reason "
        "(default: %(default)s)",
    )


class RowsLeftOut(BadShards):
    """The rows that this command has left out so far. A file that cannot be read ends the command."""

    def __init__(self, limit: int):
        """Set the limit. Raises ConfigError if it is below 0."""
        if limit < 0:
            raise ConfigError(f"--max-bad-rows={limit}: at least 0")
        super().__init__(0, limit, key_of_rows="--max-bad-rows")

    def add(self, error: BadShard) -> None:
        """Record a row, and print it the first time. Raises ConfigError if there are more than the limit."""
        new = error.shard not in self.found
        super().add(error)
        if new:
            print(f"left out: {error}", file=sys.stderr)

    def __str__(self) -> str:
        return f"; {counted(self.bad_rows, 'row')} left out" if self.bad_rows else ""
