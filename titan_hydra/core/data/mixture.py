"""Mix sources in fixed proportions. The source of a sample follows from its number, so it is the same on every layout.

The sources alternate in a pattern of PERIOD samples. At every point of the pattern, the number of samples from each
source is as near to the source's share as whole numbers can be. Within a step, the places of the pattern are assigned
to slots at random; with a fixed assignment, some slots would never read some sources.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.inputs import PERIOD, shares

from .permutation import permute


class Mixture:
    """The samples of several sources. The state of a slot consists of the slot's state in each source, by the source's
    name.
    """

    def __init__(self, parts: dict[str, Any], weights: dict[str, float], global_batch: int, seed: int):
        """Combine the sources. Raises ConfigError if their tokens come from different tokenizers."""
        self.names = sorted(parts)  # sorted, so that the order in which a user writes the sources changes nothing
        self.parts, self.global_batch, self.seed = parts, global_batch, seed
        self.turns, self.before = pattern(shares([weights[name] for name in self.names]))
        texts = {name: parts[name] for name in self.names if parts[name].tokenizer is not None}
        if len({(part.tokenizer, part.separators) for part in texts.values()}) > 1:
            hashes = ", ".join(f"{name} {part.tokenizer[:8]}" for name, part in texts.items())
            raise ConfigError(
                f"data.mixture: sources with different tokenizers ({hashes}); their ids mean different text"
            )
        self.separators: tuple[int | None, int | None] = (None, None)
        self.tokenizer: str | None = None
        for part in texts.values():
            self.separators, self.tokenizer = part.separators, part.tokenizer
        self.signature: dict[str, Any] = {f"data.mixture.{name}.weight": weights[name] for name in self.names}
        self.signature |= {
            f"data.mixture.{name}.{key}": value for name in self.names for key, value in parts[name].signature.items()
        }
        self.signature["data.mixture"] = self.names

    def choose(self, number: int) -> tuple[str, int]:
        """Return the source of a sample, and the number of earlier samples from that source."""
        step, slot = divmod(number, self.global_batch)
        turn = step * self.global_batch + permute(slot, self.global_batch, self.seed, step)
        period, position = divmod(turn, PERIOD)
        part = self.turns[position]
        return self.names[part], int(period * self.before[-1, part] + self.before[position, part])

    def sample(self, number: int, slot: int) -> dict[str, np.ndarray]:
        name, number = self.choose(number)
        return self.parts[name].sample(number, slot)

    def state(self, slot: int) -> dict[str, Any]:
        return {name: self.parts[name].state(slot) for name in self.names}

    def load(self, slot: int, state: dict[str, Any]) -> None:
        for name in self.names:
            self.parts[name].load(slot, state[name])


def pattern(counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each of PERIOD samples and, for each sample, how many earlier samples each source has. A
    sample comes from the source that is furthest behind its share.
    """
    counts_of_sources, taken = np.array(counts), np.zeros(len(counts), dtype=np.int64)
    turns, before = np.empty(PERIOD, dtype=np.int64), np.empty((PERIOD + 1, len(counts)), dtype=np.int64)
    for turn in range(PERIOD):
        before[turn] = taken
        turns[turn] = np.argmax(counts_of_sources * (turn + 1) - taken * PERIOD)
        taken[turns[turn]] += 1
    before[PERIOD] = taken
    return turns, before
