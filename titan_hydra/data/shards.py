"""Files and shards that cannot be read: left out if data.max_bad_shards allows it, always with a warning.

What is left out depends only on the files, never on the reader: a shard of text from its damaged row on, a file of
tokens that does not match its header as a whole. All layouts therefore see the same samples, and so does a resumed run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from titan_hydra.base.errors import ConfigError


class BadShard(ConfigError):
    """A shard is missing or damaged; `shard` names it, the message gives place and reason."""

    def __init__(self, shard: object, message: str) -> None:
        super().__init__(message)
        self.shard = str(shard)


UNLIMITED = "left out: "  # begins the names of entries that no limit holds for: nothing is wrong with their files


@dataclass
class BadShards:
    """The bad shards found so far, each with the reason."""

    limit: int = 0  # data.max_bad_shards
    found: dict[str, str] = field(default_factory=dict)

    def add(self, error: BadShard) -> None:
        """Record a bad shard, once. Raises ConfigError if it exceeds the limit."""
        self.found.setdefault(error.shard, str(error))
        self.check()

    def check(self) -> None:
        """Raise ConfigError if there are more than data.max_bad_shards."""
        bad = [reason for shard, reason in self.found.items() if not shard.startswith(UNLIMITED)]
        if len(bad) > self.limit:
            so_far = f"the last of {len(bad)} bad shards; " if self.limit else ""
            raise ConfigError(f"{bad[-1]}; {so_far}data.max_bad_shards={self.limit}")
