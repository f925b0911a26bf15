"""Compose the cells of a command line in milliseconds each. The result is the same as Hydra's."""

from __future__ import annotations

import functools
import itertools
import math
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from titan_hydra.core.base.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

MOST_CELLS = 10_000  # maximum number of cells that one command line may have
PLAIN = (None, [])  # the package and the defaults list of a conf/ file that declares neither of them


class Question(NamedTuple):
    """A command line with a search: the configuration without the swept keys, the overrides that all cells share, the
    overrides that list the values to choose from, and a function that composes a cell from overrides.
    """

    config: DictConfig
    fixed: list[str]
    swept: list[Override]
    compose: Callable[[list[str]], DictConfig]


class Composition(NamedTuple):
    """A configuration as Hydra composes it. It is cached and shared, so it must not be changed: copy it by unpickling
    `pickled`.
    """

    config: DictConfig
    choices: dict[str, str | None]  # the option of each group
    pickled: bytes  # copying by unpickling is nine times faster


class Composer:
    """Compose cells with the same result as Hydra: `Composer(loader)(overrides)`.

    Hydra takes a fifth of a second for each cell, because it merges 30 files. The merged files depend only on the
    chosen options, so they are cached, and Hydra's own function applies the values to a copy. If several groups vary,
    Hydra need not compose every combination: if an option sets only keys of its own group, its section does not depend
    on the choices in other groups.
    """

    def __init__(self, loader: ConfigLoader, config_name: str = "config") -> None:
        self.loader, self.config_name = loader, config_name
        self.composed: dict[tuple[str, ...], Composition] = {}  # key: the overrides that choose options
        # by the same key as `composed`: whether no defaults list refers to a choice (${...})
        self.fixed: dict[tuple[str, ...], bool] = {}
        self.files: dict[str, tuple[str | None, Any]] = {}

    def __call__(self, overrides: Sequence[str]) -> DictConfig:
        """Compose the configuration of one cell. Raises what Hydra raises."""
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.errors import ConfigCompositionException
        from hydra.types import RunMode
        from omegaconf.errors import OmegaConfBaseException

        from titan_hydra.core.base.private import ConfigLoaderImpl, apply_overrides

        parsed = OverridesParser.create().parse_overrides(list(overrides))
        ConfigLoaderImpl.validate_sweep_overrides_legal(parsed, RunMode.RUN, from_shell=True)
        # such an override may add groups, so Hydra composes the whole cell
        elsewhere = any(override.key_or_group == "hydra.searchpath" for override in parsed)
        values = [] if elsewhere else [override for override in parsed if self._is_value(override)]
        config = self._with_options([override for override in parsed if override not in values])
        try:
            apply_overrides(values, config)
        except OmegaConfBaseException as error:
            raise ConfigCompositionException from error
        return config

    def _is_value(self, override: Override) -> bool:
        """Whether an override sets the value of a key. Other overrides choose an option of a group or belong to Hydra
        itself.
        """
        if override.is_hydra_override():
            return False
        return isinstance(override.value(), dict) or not any(
            source.is_group(override.key_or_group) for source in self.loader.get_sources()
        )

    def _with_options(self, overrides: list[Override]) -> DictConfig:
        """Compose the configuration with these options. The result is a copy that the caller may change."""
        from hydra.core.override_parser.types import OverrideType
        from omegaconf import OmegaConf

        # the last ones
        changes = {
            override.get_key_element(): override for override in overrides if override.type is OverrideType.CHANGE
        }
        overrides = [
            override for override in overrides if changes.get(override.get_key_element(), override) is override
        ]
        plain = {override.key_or_group: override for override in overrides if self._is_plain(override)}
        others = [override for override in overrides if not self._is_plain(override)]
        if len(plain) < 2 or not self._are_independent(plain, others):
            return pickle.loads(self._by_hydra(overrides).pickled)
        config = pickle.loads(self._by_hydra(others).pickled)
        for group, override in plain.items():
            part = self._by_hydra([*others, override]).config[group]
            config[group] = part  # the assignment copies the section, but not OmegaConf's flags of it
            if not OmegaConf.is_struct(part):
                OmegaConf.set_struct(config[group], False)
        return config

    def _by_hydra(self, overrides: list[Override]) -> Composition:
        """Compose the overrides with Hydra, without the section `hydra`. Each list of overrides is composed only once."""
        from hydra.types import RunMode
        from omegaconf import open_dict

        lines = tuple(override.input_line for override in overrides)
        if lines not in self.composed:
            config = self.loader.load_configuration(self.config_name, list(lines), RunMode.RUN)
            choices = dict(config.hydra.runtime.choices)
            with open_dict(config):
                del config["hydra"]
            self.composed[lines] = Composition(config, choices, pickle.dumps(config))
        return self.composed[lines]

    def _is_plain(self, override: Override) -> bool:
        """Whether an override only chooses an option in a top-level group, and the option's file sets only keys of that
        group.
        """
        group, name = override.key_or_group, override.value()
        if (
            override.is_add()
            or override.is_force_add()
            or override.is_delete()
            or override.package
            or override.is_hydra_override()
        ):
            return False
        return isinstance(name, str) and "/" not in group and self._file(f"{group}/{name}") == PLAIN

    def _are_independent(self, groups: Iterable[str], others: list[Override]) -> bool:
        """Whether choices in `groups` can be composed one at a time.

        There are two conditions. With `others` applied, the current option of each group sets only keys of that group.
        And no defaults list refers to a choice (`${...}`).
        """
        from hydra.types import RunMode

        lines, choices = tuple(override.input_line for override in others), self._by_hydra(others).choices
        if lines not in self.fixed:
            merged = self.loader.compute_defaults_list(self.config_name, list(lines), RunMode.RUN).defaults
            self.fixed[lines] = not any("${" in str(self._file(default.config_path)[1]) for default in merged)
        return self.fixed[lines] and all(self._file(f"{group}/{choices.get(group)}") == PLAIN for group in groups)

    def _file(self, path: str) -> tuple[str | None, Any]:
        """Return the package that a file of conf/ declares (None if it declares none) and its defaults list."""
        from omegaconf import OmegaConf

        if path not in self.files:
            source = next((source for source in self.loader.get_sources() if source.is_config(path)), None)
            loaded = source.load_config(path) if source else None
            content = OmegaConf.to_container(loaded.config, resolve=False) if loaded else None
            self.files[path] = (
                (loaded.header.get("package"), content.get("defaults", []))
                if isinstance(content, dict)
                else ("unknown", [])
            )
        return self.files[path]


@functools.lru_cache(maxsize=1)
def composer_of(loader: ConfigLoader, config_name: str) -> Composer:
    """Return the composer of this command line. It is created once, so that all cells share its cache."""
    return Composer(loader, config_name)


@dataclass
class Cells:
    """Replaces Hydra's sweeper under -m: composes each cell at once and passes it with its overrides to `collect`.

    Hydra's own sweeper composes each cell twice, as a launcher may run the cell later on another machine, and writes a
    folder.
    """

    loader: ConfigLoader
    collect: Callable[..., Any]  # takes a configuration, its overrides and, if a search draws the cells, a Question
    config: DictConfig  # the configuration before overrides, with Hydra's own section

    def sweep(self, arguments: list[str]) -> None:
        """Compose all cells. Raises what Hydra raises for the first cell that does not compose, and ConfigError if
        there is no cell.
        """
        from hydra.core.hydra_config import HydraConfig
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from omegaconf import OmegaConf

        HydraConfig.instance().set_config(self.config)
        hydra = self.config.hydra
        lines = [*(f"{key}={value}" for key, value in (hydra.sweeper.params or {}).items()), *arguments]
        parsed = OverridesParser.create(config_loader=self.loader).parse_overrides(lines)
        composer, others = (
            composer_of(self.loader, hydra.job.config_name),
            OmegaConf.to_container(hydra.overrides.hydra),
        )

        def compose(overrides: list[str]) -> DictConfig:
            config = composer([*others, *overrides])
            # resolvers such as ${now:} give all cells the same time
            OmegaConf.copy_cache(from_config=self.config, to_config=config)
            return config

        if self._is_search(parsed):
            (fixed,) = combinations([override for override in parsed if not override.is_sweep_override()])
            swept = [override for override in parsed if override.is_sweep_override()]
            self.collect(None, fixed, Question(compose(fixed), fixed, swept, compose))
            return
        for overrides in with_count(combinations(parsed), "composed"):
            self.collect(compose(overrides), overrides)

    def _is_search(self, overrides: list[Override]) -> bool:
        """Whether a search draws the cells. The last choice of the group `search` counts, else that of conf/config.yaml."""
        chosen = [override.value() for override in overrides if override.key_or_group in ("search", "search.name")]
        return str([self.config.search.name, *chosen][-1]) not in ("off", "False")


def combinations(overrides: list[Override]) -> list[list[str]]:
    """List the overrides of each cell: every combination of the values. Raises ConfigError if there are none or more
    than MOST_CELLS.
    """
    choices: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            choices[key] = [f"{key}={override.get_value_element_as_str()}"]
            continue
        if not override.is_discrete_sweep():
            raise ConfigError(
                f"{override.input_line}: has no list of values to sweep; give the values or range(START,STOP,STEP), or let "
                "a search draw values from the interval (see search)"
            )
        values = itertools.islice(override.sweep_string_iterator(), MOST_CELLS + 1)
        if not (lines := [f"{key}={value}" for value in values]):
            raise ConfigError(f"{override.input_line}: no value, so the sweep has no cell")
        choices[key] = lines
    if math.prod(map(len, choices.values())) > MOST_CELLS:
        raise ConfigError(f"-m: more cells than {MOST_CELLS:,}, the most that one command line may have")
    return [list(cell) for cell in itertools.product(*choices.values())]


Item = TypeVar("Item")


def with_count(items: Sequence[Item], done: str) -> Iterator[Item]:
    """Yield the items one by one. After one second, print a progress line to stderr: how many items are done."""
    began = printed = time.monotonic()
    terminal = sys.stderr.isatty()
    for number, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - began > 1 and now - printed > (0.1 if terminal else 5):
            printed = now
            print(f"{done} {number} of {len(items)} cells", end="\r" if terminal else "\n", file=sys.stderr, flush=True)
    if terminal and printed > began:
        print("\033[K", end="", file=sys.stderr, flush=True)
