"""Files and rows that cannot be used. They are left out, with a warning, if data.max_bad_shards or data.max_bad_rows
allows that.

Only the contents of the files determine what is left out. A row that cannot be used costs this row. A file that cannot
be read from some place on is left out from there on, and a file of tokens that does not match its header as a whole. So
all layouts get the same samples, and so does a resumed run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from titan_hydra.base.errors import ConfigError

# prefixes of the names of entries: of rows, and of what does not count as bad, because the files are intact
ROW, UNLIMITED = "row ", "left out: "


class BadShard(ConfigError):
    """The shard `shard` is missing or damaged. The message contains the place of the damage and the reason."""

    def __init__(self, shard: object, message: str) -> None:
        super().__init__(message)
        self.shard = str(shard)


class BadRow(BadShard):
    """The row at `where`, such as FILE:LINE, cannot be used. The rows behind it can."""

    def __init__(self, where: str, reason: object) -> None:
        super().__init__(ROW + where, f"{where}: {reason}")


@dataclass
class BadShards:
    """The bad shards and rows that were found so far."""

    limit: int = 0  # data.max_bad_shards
    rows: int = 0  # data.max_bad_rows
    found: dict[str, str] = field(default_factory=dict)  # reason for each name

    def add(self, error: BadShard) -> None:
        """Record a bad shard or row. Raises ConfigError if there are more than the limit."""
        self.found.setdefault(error.shard, str(error))
        self.check()

    def check(self) -> None:
        """Raise ConfigError if there are more bad shards, or more bad rows, than the limit."""
        rows = [reason for name, reason in self.found.items() if name.startswith(ROW)]
        shards = [reason for name, reason in self.found.items() if not name.startswith((ROW, UNLIMITED))]
        for key, limit, what, bad in (
            ("data.max_bad_shards", self.limit, "shards", shards),
            ("data.max_bad_rows", self.rows, "rows", rows),
        ):
            if len(bad) > limit:
                so_far = f"the last of {len(bad)} bad {what}; " if limit else ""
                raise ConfigError(f"{bad[-1]}; {so_far}{key}={limit}")
