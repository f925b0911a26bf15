"""Files and rows that cannot be used. They are left out, with a warning, if data.max_bad_shards or data.max_bad_rows
allows that.

Only the contents of the files determine what is left out. A row that cannot be used costs this row. A file that cannot
be read from some place on is left out from there on, and a file of tokens that does not match its header as a whole. So
all layouts get the same samples, and so does a resumed run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from titan_hydra.core.base.errors import ConfigError

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
    key_of_rows: str = "data.max_bad_rows"  # what a user sets to have more rows left out

    def __post_init__(self) -> None:
        self.bad_rows = sum(name.startswith(ROW) for name in self.found)
        self.bad_shards = sum(not name.startswith((ROW, UNLIMITED)) for name in self.found)

    def restore(self, earlier: dict[str, str]) -> None:
        """Add what a run had found before it was resumed."""
        self.found = earlier | self.found
        self.__post_init__()

    def add(self, error: BadShard) -> None:
        """Record a bad shard or row. Raises ConfigError if there are more than the limit."""
        if error.shard not in self.found:
            self.found[error.shard] = str(error)
            self.bad_rows += error.shard.startswith(ROW)
            self.bad_shards += not error.shard.startswith((ROW, UNLIMITED))
        self.check()

    def check(self) -> None:
        """Raise ConfigError, with the last reason, if there are more bad shards, or more bad rows, than the limit."""
        for key, limit, units, number in (
            ("data.max_bad_shards", self.limit, "shards", self.bad_shards),
            (self.key_of_rows, self.rows, "rows", self.bad_rows),
        ):
            if number > limit:
                reasons = [
                    reason
                    for name, reason in self.found.items()
                    if not name.startswith(UNLIMITED) and name.startswith(ROW) is (units == "rows")
                ]
                so_far = f"the last of {number} bad {units}; " if limit else ""
                raise ConfigError(f"{reasons[-1]}; {so_far}{key}={limit}")
