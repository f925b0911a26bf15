"""Read a small YAML file of described keys, such as that of a gate, or what a user states about a run of another program."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import Fault, did_you_mean, suggest
from titan_hydra.core.job.config.files import similar
from titan_hydra.core.job.config.ranges import Interval, range_of

LARGEST_FILE = 65_536  # bytes; a file of some keys is much smaller


def read_keys(cls: Any, file: Path) -> Any:
    """Read a YAML file into a dataclass whose fields are made by `key`. Raises ConfigError with a line for each fault of
    the file.
    """
    content = _content(file)
    keys = [spec.name for spec in dataclasses.fields(cls)]
    if not isinstance(content, dict) or not content:
        found = "is empty" if not content else f"holds {type(content).__name__}, not keys with values"
        raise ConfigError(f"{file}: {found}; keys: {', '.join(keys)}")
    if faults := list(_faults(cls, content, keys)):
        raise ConfigError("\n".join(f"{file}: {fault}" for fault in faults))
    return cls(**content)


def _content(file: Path) -> Any:
    from titan_hydra.core.base.private import get_yaml_loader

    try:
        if file.is_file() and file.stat().st_size > LARGEST_FILE:
            raise ConfigError(f"{file}: {file.stat().st_size:,} bytes, and {LARGEST_FILE:,} are the most")
        return yaml.load(file.read_text(encoding="utf-8-sig"), Loader=get_yaml_loader())
    except FileNotFoundError as error:
        raise ConfigError(f"{file}: no such file{did_you_mean(similar(str(file)))}") from error
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{file}:{line}: not YAML: {error.problem or error.context}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a control character, or a date that does not exist
        raise ConfigError(f"{file}: not YAML: {' '.join(str(error).split())}") from error


def _faults(cls: Any, content: dict[Any, Any], keys: list[str]) -> Iterator[Fault]:
    hints = typing.get_type_hints(cls)
    for name, value in content.items():
        if name not in keys:
            yield Fault(str(name), value, "no such key", suggest(str(name), keys) or tuple(keys))
        else:
            yield from _faults_of_value(name, value, hints[name], cls.__dataclass_fields__[name])


def _faults_of_value(name: str, value: Any, kind: Any, spec: Any) -> Iterator[Fault]:
    """Yield the fault of a value that has another type than its key, or is outside the key's range or choices."""
    kinds = typing.get_args(kind) or (kind,)
    choices, allowed = spec.metadata["choices"], range_of(spec)
    if value is None:
        yield Fault(name, value, "no value given", tuple(choices))
    elif choices:
        if value not in choices:
            yield Fault(name, value, "not one of the choices", tuple(choices))
    elif str in kinds:
        if not isinstance(value, str):
            yield Fault(name, value, "must be text", (f"'{value}'",) if not isinstance(value, dict | list) else ())
        elif reason := allowed.objection(value) if allowed else None:
            yield Fault(name, value, reason)
    elif isinstance(value, bool) or not isinstance(value, int | float):
        yield Fault(name, value, f"must be a {'number' if float in kinds else 'whole number'}")
    elif isinstance(value, float) and float not in kinds:
        whole = (round(value),) if abs(value) < 2**53 else ()  # false for NaN, too
        yield Fault(name, value, "must be a whole number", whole)
    elif isinstance(allowed, Interval) and (reason := allowed.objection(value)):
        yield Fault(name, value, reason, allowed.nearest(value))
