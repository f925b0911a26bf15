"""Read a run's frozen configuration, config.json, and refuse what was edited or what this version does not know."""

import contextlib
import copy
import dataclasses
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import Job, from_dict, identity
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.load import give_types
from titan_hydra.core.job.config.relayout import with_layout_of
from titan_hydra.core.job.config.user_code import require_user_modules

from . import layout
from .run import hash_of

UNREADABLE = (KeyError, TypeError, ValueError, AttributeError)  # what `from_dict` raises for another version's file


def load_job(directory: Path) -> Job:
    """Read config.json. Raises ConfigError if its hash, computed with the layout of the first attempt, differs from the
    hash in the directory's name; then the file was edited, or another version has written it.
    """
    file = layout.CONFIG.of(directory)
    content = layout.CONFIG.read(directory)
    if not content:
        raise ConfigError(f"{file}: no such file, or not JSON")
    job = frozen_job(content, file, directory)
    expected = hash_of(directory)
    # this file exists if the run's layout has changed (`titan resume`, `elastic`)
    first = layout.FIRST_CONFIG.read(directory)
    if first:
        frozen_job(first, layout.FIRST_CONFIG.of(directory), directory)
    actual = _hash_of_content(content, first)
    if actual != expected:
        file, actual = _changed_file(directory, content, actual, expected)
        raise ConfigError(
            f"{file}: its hash is {actual}, and the directory's is {expected}: it was changed after it was submitted, or "
            "another version of titan_hydra has written it; the command line that started the run writes it anew"
        )
    return job


def frozen_job(content: dict[str, Any], file: Path, directory: Path) -> Job:
    """Return the job of a frozen configuration, read from `file` of a run's directory. Raises ConfigError with a line for
    each key or option that this version lacks: its value, and what to do.
    """
    if isinstance(train := content.get("train"), dict):
        require_user_modules(train.get("imports", []))
    job, error = None, None
    try:
        job = from_dict(Job, content)
    except (*UNREADABLE, ConfigError) as raised:
        error = raised
    if faults := [*_missing(content), *give_types(Job, copy.deepcopy(content), "", needed=False)]:
        advice = _advice(content, faults, directory)
        raise ConfigError("\n".join(f"{file}: {fault}; {advice}" for fault in faults))
    if job is None:
        raise ConfigError(f"{file}: written by another version of titan_hydra ({error})") from error
    return job


def _missing(content: dict[str, Any]) -> Iterator[Fault]:
    """Yield a fault for each section that every configuration of this version has, and this one has not."""
    for spec in dataclasses.fields(Job):
        section = spec.default_factory is not dataclasses.MISSING and dataclasses.is_dataclass(spec.default_factory)
        if section and spec.metadata["identity"] != "if set" and spec.name not in content:
            yield Fault(spec.name, None, "the section is missing")


def _advice(content: dict[str, Any], faults: list[Fault], directory: Path) -> str:
    """Return what to do about keys that this version lacks: delete them, if the run has its hash without them."""
    rest = copy.deepcopy(content)
    for fault in faults:
        *above, last = fault.key.split(".")
        with contextlib.suppress(KeyError, TypeError):
            del reduce(lambda section, name: section[name], above, rest)[last]
    if _hash_of_content(rest, layout.FIRST_CONFIG.read(directory)) == hash_of(directory):
        return "the run is the same without it: delete it from this file"
    commit = str(layout.ENV.read(directory).get("git_sha") or "unknown")[:8]
    return (
        "it was changed after it was submitted, or only the version of titan_hydra that wrote it can go on with it "
        f"(commit {commit} in env.json)"
    )


def _changed_file(directory: Path, content: dict[str, Any], actual: str, expected: str) -> tuple[Path, str]:
    """Return which of a run's configurations has a wrong hash, and that hash: the first attempt's, one of the layouts of
    an elastic run, from which its batch script has copied config.json, or config.json itself.
    """
    first = layout.FIRST_CONFIG.of(directory)
    if first.exists() and (hash_of_first := _hash_of_content(layout.FIRST_CONFIG.read(directory))) != expected:
        return first, hash_of_first
    for number, config in layout.LAYOUT.read_all(directory).items():
        if config == content:
            return layout.LAYOUT.of(directory, number), actual
    return layout.CONFIG.of(directory), actual


def _hash_of_content(content: dict[str, Any], first: dict[str, Any] | None = None) -> str:
    """Return the hash of a configuration as config.json has it, with the layout of `first` if that is given; "unknown" if
    one of the two is damaged.
    """
    try:
        return identity(from_dict(Job, with_layout_of(content, first) if first else content))
    except (*UNREADABLE, ConfigError):
        return "unknown"
