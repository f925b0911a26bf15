"""The values that a search may give to keys, read from Hydra's grammar for sweeps: lists, range(), interval(), and the
tags log and int.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.load import kind_of
from titan_hydra.experiments.compose.overrides import mistakes, unknown_key

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from optuna.distributions import BaseDistribution

MOST_VALUES = 10_000  # maximum number of listed values of a key
DIGITS = 5  # significant digits of a drawn number


@dataclass(frozen=True)
class Dimension:
    """The values of one key: a list of texts, or the numbers between two bounds."""

    key: str  # as in the override, with a + if the override has one
    typed: str  # the override as it was typed
    values: tuple[str, ...] = ()  # empty for an interval
    low: float = 0
    high: float = 0
    log: bool = False
    whole: bool = False

    @property
    def distribution(self) -> BaseDistribution:
        """The values as a distribution of Optuna."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        if self.values:
            return CategoricalDistribution(self.values)
        if self.whole:
            return IntDistribution(int(self.low), int(self.high), log=self.log)
        return FloatDistribution(self.low, self.high, log=self.log)

    @property
    def ends(self) -> tuple[str, ...]:
        """The values that are checked before a search starts: all listed ones, or the bounds."""
        return self.values or (self.text(self.low), self.text(self.high))

    def rounded(self, value: Any) -> Any:
        """Return a drawn value with at most DIGITS significant digits, within the bounds."""
        if self.values or self.whole:
            return value
        return min(max(float(f"{value:.{DIGITS}g}"), self.low), self.high)

    def text(self, value: Any) -> str:
        """Return a value as it stands in an override."""
        return value if isinstance(value, str) else str(int(value)) if self.whole else repr(float(value))

    def value(self, text: str) -> Any:
        """Return the value of which `text` is the text. Raises ValueError if the key has no such value."""
        value: str | float = text
        if not self.values:
            value = number = int(text) if self.whole else float(text)
        if value not in self.values if self.values else not self.low <= number <= self.high:
            raise ValueError(text)
        return value


@dataclass(frozen=True)
class Space:
    """What a search chooses from: a dimension for each swept key, in the order of the command line."""

    dimensions: tuple[Dimension, ...]

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        return {dimension.key: dimension.distribution for dimension in self.dimensions}

    @property
    def size(self) -> float:
        """The number of different trials; infinite with an interval of numbers."""
        return math.prod(
            len(dimension.values) or (dimension.high - dimension.low + 1 if dimension.whole else math.inf)
            for dimension in self.dimensions
        )

    def rounded(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return drawn values, rounded as trials use them."""
        return {dimension.key: dimension.rounded(values[dimension.key]) for dimension in self.dimensions}

    def overrides(self, values: dict[str, Any]) -> list[str]:
        """Return the overrides of a trial with these values."""
        return [f"{dimension.key}={dimension.text(values[dimension.key])}" for dimension in self.dimensions]

    def values(self, overrides: list[str]) -> dict[str, Any] | None:
        """Return the values in the overrides of a trial, which may have others besides; None if a key has none there."""
        texts = dict(one.partition("=")[::2] for one in overrides)
        try:
            return {one.key: one.value(texts[one.key]) for one in self.dimensions}
        except (KeyError, ValueError):
            return None

    def grid(self) -> list[dict[str, Any]]:
        """Return every combination of listed values."""
        keys = [dimension.key for dimension in self.dimensions]
        return [
            dict(zip(keys, cell, strict=True))
            for cell in itertools.product(*(dimension.values for dimension in self.dimensions))
        ]

    def probes(self) -> list[list[str]]:
        """Return the trials that are checked before a search starts: the first value of each key and, for each key,
        every value of `ends` with the first values of the other keys.
        """
        first = {dimension.key: dimension.ends[0] for dimension in self.dimensions}
        probes = [first] + [first | {dimension.key: end} for dimension in self.dimensions for end in dimension.ends[1:]]
        return [[f"{key}={value}" for key, value in cell.items()] for cell in probes]


def space_of(swept: list[Override]) -> Space:
    """Read the swept overrides of a command line. Raises ConfigError with a line for each one without values."""
    dimensions, lines = [], []
    for override in swept:
        try:
            dimensions.append(_dimension(override))
        except ConfigError as error:
            lines.append(str(error))
    if not swept:
        lines = [
            "search: no key has values to choose from; give some, as 'optimizer.lr=tag(log, interval(1e-4, 1e-1))'"
        ]
    if lines:
        raise ConfigError("\n".join(lines))
    return Space(tuple(dimensions))


def _dimension(override: Override) -> Dimension:
    """Read a swept override: a list of values, or an interval. Raises ConfigError with what is wrong with it."""
    from hydra.core.override_parser.types import IntervalSweep, QuotedString

    key, typed, sweep = override.get_key_element(), override.input_line, override.value()
    if not isinstance(sweep, IntervalSweep):
        values = list(itertools.islice(override.sweep_string_iterator(), MOST_VALUES + 1))
        if not values or len(values) > MOST_VALUES:
            raise ConfigError(f"{typed}: gives {'more than 10,000' if values else 'no'} values to choose from")
        return Dimension(key, typed, tuple(dict.fromkeys(values)))
    if kind_of(override.key_or_group) is None and not override.is_add():
        raise ConfigError(unknown_key(override.key_or_group))
    low, high = sweep.start, sweep.end
    if any(isinstance(end, QuotedString | str) or end is None for end in (low, high)):
        raise ConfigError(f"{typed}: needs two bounds that are numbers, as interval(1e-4,1e-1)")
    whole, log = "int" in sweep.tags or kind_of(override.key_or_group) is int, "log" in sweep.tags
    if unknown := sorted(sweep.tags - {"int", "log", "float"}):
        raise ConfigError(f"{typed}: the tag {unknown[0]} has no meaning; log and int have one")
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{typed}: the first bound must be below the second, and both finite")
    if log and low <= 0:
        raise ConfigError(f"{typed}: a logarithmic interval begins above 0")
    if whole and not (float(low).is_integer() and float(high).is_integer()):
        raise ConfigError(f"{typed}: {override.key_or_group} is a whole number, and so must be the bounds")
    dimension = Dimension(key=key, typed=typed, values=(), low=low, high=high, log=log, whole=whole)
    if lines := mistakes([f"{key}={end}" for end in dimension.ends]):
        raise ConfigError(f"{typed}: {lines[0]}")
    return dimension
