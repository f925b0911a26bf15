"""Register the schema with Hydra, and compose one job for programs other than launch.py."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.files import CONF
from titan_hydra.core.job.config.load import defaults, picking, read
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check

from .explain import explain
from .folders import project_in, usable_folders
from .overrides import mistakes, steps_of_a_fake_rank
from .sweep import sweep_cells

if TYPE_CHECKING:
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from .cells import Composer

Folders = Path | Sequence[Path] | None  # what --config-dir names


def later_wins(*overrides: str) -> list[str]:
    """Keep only the last override of each key: Hydra refuses a command line that chooses a group twice."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


def register_schema() -> None:
    """Register the schema with Hydra, and `Cells` as its sweeper. Call this before Hydra composes; it may be repeated."""
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from omegaconf import OmegaConf

    from .cells import Cells

    def sweeper(*, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> Cells:
        return Cells(hydra_context.config_loader, task_function, config)

    # Plain defaults, as `read` types all values. Sections that select a part (an optimizer, a data source, ...) take any
    # key here, since the part's keys are known only once the user's modules are imported.
    schema = OmegaConf.create(defaults(Job))
    for name in picking():
        OmegaConf.set_struct(schema[name], False)
    ConfigStore.instance().store(name="schema", node=schema)
    plugins: Any = Plugins.instance()
    # otherwise Hydra would look for our sweeper only in a package called hydra_plugins
    plugins.instantiate_sweeper = sweeper


@functools.cache
def own_composer(folders: tuple[Path, ...] = ()) -> Composer:
    """Return the composer of the package's conf/ and, after it, of `option_folders`."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    from .cells import Composer

    register_schema()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        loader: Any = GlobalHydra.instance().config_loader()
    path = loader.get_search_path()
    for folder in folders:
        path.prepend("command-line", f"file://{folder}", anchor="schema")  # the schema must come last
    return Composer(type(loader)(path))


def option_folders(config_dir: Folders = None) -> tuple[Path, ...]:
    """Return the folders with further options of a `titan` command: those of --config-dir, then the conf/ of the project
    in the current folder, as launch.py there has it. Raises ConfigError for a folder that cannot be one.
    """
    named = [config_dir] if isinstance(config_dir, Path) else config_dir or []
    return tuple(usable_folders(named, project_in(Path.cwd())))


def compose_job(*overrides: str, config_dir: Folders = None) -> Job:
    """Compose, freeze and check one job, for programs other than launch.py. Raises ConfigError."""
    job = freeze(compose_unchecked(*overrides, config_dir=config_dir))
    if faults := check(job):
        raise ConfigError("\n".join(map(str, faults)))
    return job


def compose_unchecked(*overrides: str, config_dir: Folders = None) -> Job:
    """Compose and type one job without freezing or checking it. Raises ConfigError for unknown keys and options."""
    folders = option_folders(config_dir)
    if lines := mistakes(overrides, [CONF, *folders]):
        raise ConfigError("\n".join(lines))
    with in_one_line():
        job, faults = read(own_composer(folders)(overrides))
    if faults:
        raise ConfigError("\n".join(map(str, faults)))
    return job


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """While the block runs, replace exceptions that Hydra raises for a user's mistake by a ConfigError of one line."""
    try:
        yield
    except Exception as error:
        if (line := explain(error)) is None:
            raise
        raise ConfigError(line) from error


def compose_cells(overrides: list[str], config_dir: Folders = None) -> list[tuple[Job, list[str], str]]:
    """Compose and freeze the cells of a command line. Returns each job, its overrides and its name in the sweep file.
    Raises ConfigError.
    """
    folders = option_folders(config_dir)
    words = [word for word in overrides if "sweeps=" not in word]
    if lines := mistakes(words, [CONF, *folders]) + steps_of_a_fake_rank(words):
        raise ConfigError("\n".join(lines))
    with in_one_line():
        composed = sweep_cells(own_composer(folders), overrides)
    jobs = []
    for config, typed in composed:
        job, faults = read(config)
        if job is None or faults:
            raise ConfigError("\n".join(map(str, faults)))
        jobs.append((freeze(job), typed, config.sweep.cell or ""))
    return jobs
