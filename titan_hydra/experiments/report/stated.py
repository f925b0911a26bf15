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
from titan_hydra.core.job.config.field import converted, type_fault, value_faults
from titan_hydra.core.job.config.files import similar

LARGEST_FILE = 65_536  # bytes; a file of some keys is much smaller


def read_keys(cls: Any, file: Path) -> Any:
    """Read a YAML file into a dataclass whose fields are made by `key`. Raises ConfigError with a line for each fault of
    the file.
    """
    content = _content(file)
    keys = [spec.name for spec in dataclasses.fields(cls)]
    if not isinstance(content, dict) or not content:
        problem = "is empty" if not content else f"holds {type(content).__name__}, not keys with values"
        raise ConfigError(f"{file}: {problem}; keys: {', '.join(keys)}")
    if faults := list(_faults(cls, content, keys)):
        raise ConfigError("\n".join(f"{file}: {fault}" for fault in faults))
    return cls(**content)


def _content(file: Path) -> Any:
    """Return the content of a YAML file. Raises ConfigError if it cannot be read."""
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
    """Give the values of a file the types of their keys, in place. Yield a fault for each that does not fit.

    A text must be one in the file too: YAML reads a hash such as 01234567 as a number, and not as the same digits.
    """
    hints = typing.get_type_hints(cls)
    for name, value in content.items():
        if name not in keys:
            yield Fault(str(name), value, "no such key", suggest(str(name), keys) or tuple(keys))
            continue
        kind = next(part for part in typing.get_args(hints[name]) or (hints[name],) if part is not type(None))
        spec = cls.__dataclass_fields__[name]
        choices = spec.metadata["choices"]
        if value is None:
            yield Fault(name, value, "no value given", tuple(choices))
        elif kind is str and not choices and not isinstance(value, str | list | dict):
            yield Fault(name, value, "must be text", (f"'{value}'",))
        else:
            try:
                content[name] = converted(kind, value)
            except ValueError:
                yield type_fault(name, kind, value, spec)
            else:
                yield from value_faults(name, spec, content[name])
