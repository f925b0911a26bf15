"""Change values of an existing job by overrides, as on the command line of launch.py. Options of groups cannot be
changed this way, as Hydra would have to compose them.
"""

import copy
from collections.abc import Container, Iterable
from dataclasses import is_dataclass
from functools import reduce
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import bad_value, did_you_mean, suggest
from titan_hydra.core.job.config.field import converted, type_fault
from titan_hydra.core.job.config.load import (
    PICKED,
    kind_of,
    known_keys,
    no_such_key,
    picked_anew,
    picking,
    to_dict,
    values_are_what_the_schema_takes,
)
from titan_hydra.core.job.config.schema import Job

from .explain import explain
from .overrides import mistakes


def change(job: Job, values: Iterable[str], experiment: Container[str] = ()) -> Job:
    """Return a copy of a job with each KEY=VALUE applied.

    Raises ConfigError for a bad value, and for a key of the identity hash that `experiment` does not list.
    """
    job, values = copy.deepcopy(job), list(values)
    if lines := mistakes(values):
        raise ConfigError("\n".join(lines))
    for text in values:
        key, value = _typed(text, job)
        if known_keys()[key].metadata["identity"] and key not in experiment:
            raise bad_value(
                key,
                text.partition("=")[2],
                "is part of the experiment, which stays the same; another one goes on "
                f"from its newest checkpoint with the run's own line and {text} checkpoint.initial_load_path=RUN "
                "checkpoint.exclude_from_loading=[] (docs/reliability.md)",
            )
        *path, name = key.split(".")
        section = picking().get(path[0]) if len(path) == 1 else None
        if section and PICKED[section][0] == name:
            setattr(job, path[0], picked_anew(getattr(job, path[0]), value))
        else:
            setattr(reduce(getattr, path, job), name, value)
    if faults := list(values_are_what_the_schema_takes(job)):
        raise ConfigError("\n".join(map(str, faults)))
    return job


def _typed(text: str, job: Job) -> tuple[str, Any]:
    """Parse KEY=VALUE into the key and its value, which gets the type that the schema gives the key."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    override = OverridesParser.create().parse_override(text)
    key = override.key_or_group
    if override.is_delete() or override.is_sweep_override():
        raise ConfigError(f"{text}: only KEY=VALUE, with one value")
    if key not in known_keys() or any(known.startswith(f"{key}.") for known in known_keys()):
        close = [known for known in suggest(key, known_keys()) if known != key]
        raise ConfigError(f"{key}: no such key" + did_you_mean(close))
    section: Any = job
    above = ""
    for name in key.split("."):  # the key is in the schema, but the part that the job selects may lack the key
        if is_dataclass(section) and not hasattr(section, name):
            raise no_such_key(type(section), above, name, override.value(), vars(section)).error
        section, above = getattr(section, name, None), f"{above}{name}."
    schema = OmegaConf.create(to_dict(job))  # for the keys that the value refers to
    OmegaConf.update(schema, key, override.value(), merge=False)
    try:
        value = OmegaConf.select(schema, key)
    except OmegaConfBaseException as error:
        raise ConfigError(explain(error) or str(error)) from error
    value, kind = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value, kind_of(key)
    try:
        return key, converted(kind, value)
    except ValueError:
        raise type_fault(key, kind, value, known_keys()[key]).error from None
