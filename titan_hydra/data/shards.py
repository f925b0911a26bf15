"""Files and shards that cannot be read. They are left out, with a warning, if data.max_bad_shards allows that.

Only the contents of the files determine what is left out. A damaged shard of text is left out from the damaged row on;
a file of tokens that does not match its header is left out as a whole. So all layouts get the same samples, and so does
a resumed run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from titan_hydra.base.errors import ConfigError


class BadShard(ConfigError):
    """The shard `shard` is missing or damaged. The message contains the place of the damage and the reason."""

    def __init__(self, shard: object, message: str) -> None:
        super().__init__(message)
        self.shard = str(shard)


UNLIMITED = "left out: "  # prefix of the names of entries that do not count as bad, because their files are intact


@dataclass
class BadShards:
    """The bad shards that were found so far."""

    limit: int = 0  # data.max_bad_shards
    found: dict[str, str] = field(default_factory=dict)  # reason for each shard

    def add(self, error: BadShard) -> None:
        """Record a bad shard. Raises ConfigError if there are more than the limit."""
        self.found.setdefault(error.shard, str(error))
        self.check()

    def check(self) -> None:
        """Raise ConfigError if there are more bad shards than the limit."""
        bad = [reason for shard, reason in self.found.items() if not shard.startswith(UNLIMITED)]
        if len(bad) > self.limit:
            so_far = f"the last of {len(bad)} bad shards; " if self.limit else ""
            raise ConfigError(f"{bad[-1]}; {so_far}data.max_bad_shards={self.limit}")
