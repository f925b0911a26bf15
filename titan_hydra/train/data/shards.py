"""Files and shards that cannot be read: left out where data.max_bad_shards allows it, and never without a word.

What is left out depends on the files alone, never on who reads them: a shard of text from its damaged row on, a file of tokens that is not
what its header says as a whole. So all layouts see the same samples, and so does a run that is resumed.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from titan_hydra.config.status import ConfigError


class BadShard(ConfigError):
    """A shard is missing or damaged; `shard` names it, the message says where and how."""

    def __init__(self, shard: object, message: str) -> None:
        super().__init__(message)
        self.shard = str(shard)


@dataclass
class BadShards:
    """Those found so far, each with the reason."""

    limit: int = 0  # data.max_bad_shards
    found: dict[str, str] = field(default_factory=dict)

    def add(self, error: BadShard) -> None:
        """Note one, however often it is met. Raises ConfigError if it is one too many."""
        self.found.setdefault(error.shard, str(error))
        self.check()

    def check(self) -> None:
        """Raise ConfigError if there are more than data.max_bad_shards."""
        if len(self.found) > self.limit:
            so_far = f"the last of {len(self.found)} bad shards; " if self.limit else ""
            raise ConfigError(f"{list(self.found.values())[-1]}; {so_far}data.max_bad_shards={self.limit}")
