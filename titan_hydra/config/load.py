"""Turn a composed Hydra configuration into a typed `Job`, and compute its identity."""

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Callable, Iterator
from typing import Any

from .family import families, family_named, unknown_family
from .fault import Fault, as_typed, suggest
from .field import Changes
from .model import Model
from .operation import Validation
from .ranges import Interval, Text, range_of
from .registry import Names
from .schema import Job, Source, default_of
from .user_code import load_user_modules, require_user_modules

# Keys that were hashed once and are no more: as if at their defaults of then, so that runs without them keep their
# hash.
HASHED_ONCE: dict[type, dict[str, Any]] = {
    Model: {"extra": {}},
    Validation: {"name": "off", "interval": 100, "steps": 10},
    Source: {"validation_path": None, "validation_split": "validation"},
}


def to_dict(job: Any) -> dict[str, Any]:
    """Return a (nested) dataclass as plain dicts, lists and scalars, the form of config.json."""
    return dataclasses.asdict(job)


def from_dict(cls: Any, data: dict[str, Any]) -> Any:
    """Build a dataclass from what `to_dict` returned: a job imports the user's modules, and its model has the keys of
    its family.

    Raises KeyError for a missing key and TypeError for an unknown one: config.json is written by this program, not by
    hand. Raises ConfigError if a module cannot be imported or the family is not registered.
    """
    if cls is Job:
        require_user_modules(data["train"]["imports"])
    if cls is Model:
        cls = family_named(data["family"]).config
    if cls is Validation and data["name"] == "off":
        return cls()  # files of earlier versions hold another interval, which nothing reads
    hints = _hints(cls)
    values = dict(data)
    if issubclass(cls, Model):
        values |= values.pop("extra", {})  # of version 0.1: the keys of a user's family
    # which a file of an earlier version lacks
    late = {spec.name for spec in dataclasses.fields(cls) if spec.metadata["late"]}
    for name, kind in hints.items():
        if name in late and name not in values:
            continue
        if dataclasses.is_dataclass(kind):
            values[name] = from_dict(kind, values[name])
        elif entry := _entry(kind):
            values[name] = {key: from_dict(entry, value) for key, value in values[name].items()}
    return cls(**values)


def read(config: Any) -> tuple[Job | None, list[Fault]]:
    """Type one composed cell (an OmegaConf DictConfig). Returns the job, or None and its faults.

    Only keys and single values are checked; how values fit together is left to `check`.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        data: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        return None, [Fault(error.full_key, _as_written(config, error.full_key), str(error).splitlines()[0])]
    faults = list(_model_faults(data)) or list(_key_faults(Job, data, ""))
    if faults:
        return None, faults
    job = from_dict(Job, data)
    faults = list(values_are_what_the_schema_takes(job))
    return (None, faults) if faults else (job, [])


def _model_faults(data: dict[str, Any]) -> Iterator[Fault]:
    """Give the model's section the types and defaults of its family, in place. Yields a fault for what does not suit
    it.

    Hydra composes the section before the user's modules are imported, so it takes any key there.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    train, section = data.get("train"), data.get("model")
    if not isinstance(train, dict) or not isinstance(train.get("imports"), list) or not isinstance(section, dict):
        return  # `_key_faults` names the key that is missing
    if not all(isinstance(module, str) for module in train["imports"]):
        yield Fault("train.imports", train["imports"], "must be a list of words, not of lists or tables")
        return
    if faults := load_user_modules(train["imports"]):
        yield from faults
        return
    if (name := section.get("family")) not in families():
        yield unknown_family(name)
        return
    cls = families()[name].config
    if faults := list(_key_faults(cls, section, "model.", needed=_hints(Model))):
        yield from faults
        return
    try:
        typed = OmegaConf.merge(OmegaConf.structured(cls), section)
    except OmegaConfBaseException as error:
        key = f"model.{error.full_key}"
        value = functools.reduce(lambda node, part: node[part], error.full_key.split("."), section)
        yield Fault(key, value, str(error).splitlines()[0])
        return
    data["model"] = OmegaConf.to_container(typed)


def _as_written(config: Any, key: str) -> Any:
    """Return the value of a key before its interpolation is resolved."""
    from omegaconf import OmegaConf

    value = OmegaConf.to_container(config, resolve=False)
    for part in key.split("."):
        value = value.get(part, "?") if isinstance(value, dict) else "?"
    return value


def identity(job: Job) -> str:
    """Return 8 hex digits of the sha256 of the configuration, without the fields that are not part of the
    experiment.
    """
    return hashlib.sha256(json.dumps(_identity_part(job), sort_keys=True).encode()).hexdigest()[:8]


def _identity_part(node: Any) -> dict[str, Any]:
    part: dict[str, Any] = next((dict(was) for kind, was in HASHED_ONCE.items() if isinstance(node, kind)), {})
    for spec in dataclasses.fields(node):
        value = getattr(node, spec.name)
        if isinstance(value, dict):
            value = {key: _identity_part(entry) if dataclasses.is_dataclass(entry) else entry for key, entry in value.items()}
        if dataclasses.is_dataclass(value):
            part |= {spec.name: inner} if (inner := _identity_part(value)) or not spec.metadata["late"] else {}
        elif spec.metadata["identity"] and not (spec.metadata["late"] and value == default_of(spec)):
            part[spec.name] = value
    return part


def known_keys() -> dict[str, dataclasses.Field[Any]]:
    """Return every dotted key of the schema with its field, in order, those of all families too. It is cached: do not
    change it.
    """
    return _keys(Job, "", model_classes())


def changes_of(key: str) -> tuple[str, Changes]:
    """Return what another value of a dotted key changes, and the name that says it: a section, if that says it for its
    keys, else the key.

    A key below a name of the user's own (data.mixture.web.weight) counts as the key above. One outside the hash changes
    the technique, unless it says something else; one that no schema knows, as of a user's family, what its section
    does.
    """
    return _changes(key, model_classes())


@functools.cache
def _changes(key: str, models: tuple[type[Model], ...]) -> tuple[str, Changes]:
    known, parts = _keys(Job, "", models), key.split(".")
    names = [name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in known] or [key]
    if names[0] in known and not known[names[0]].metadata["identity"] and not known[names[0]].metadata["changes"]:
        return names[0], "technique"
    stated = next((name for name in names if name in known and known[name].metadata["changes"]), names[0])
    return stated, known[stated].metadata["changes"] or "learning" if stated in known else "learning"


@functools.cache
def _keys(cls: Any, prefix: str, models: tuple[type[Model], ...]) -> dict[str, dataclasses.Field[Any]]:
    keys = {}
    for spec in dataclasses.fields(cls):
        keys[prefix + spec.name] = spec
        kind = _hints(cls)[spec.name]
        if dataclasses.is_dataclass(kind):
            inners: tuple[Any, ...] = models if kind is Model else (kind,)
            for inner in inners:
                for name, field in _keys(inner, f"{prefix}{spec.name}.", models).items():
                    keys.setdefault(name, field)  # what all families share is said once
    return keys


def model_classes() -> tuple[type[Model], ...]:
    """Return the keys that all families share, then those of each."""
    return (Model, *dict.fromkeys(family.config for family in families().values()))


def kind_of(key: str) -> Any:
    """Return the type of a dotted key, also of one below a name of the user's own; None if there is no such key."""
    return _kind(key, model_classes())


@functools.cache
def _kind(key: str, models: tuple[type[Model], ...]) -> Any:
    kind: Any = Job
    for part in key.split("."):
        if kind is Model:
            kind = next((hints[part] for hints in map(_hints, models) if part in hints), None)
        elif dataclasses.is_dataclass(kind):
            kind = _hints(kind).get(part)
        elif typing.get_origin(kind) is dict:
            kind = typing.get_args(kind)[1]
        elif kind is not Any:
            return None
    return kind


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any, Any]]:
    """Yield every key of a job, or of a section of it, that holds a value: dotted name, field, value, and the section
    that contains it.
    """
    for spec in dataclasses.fields(node):
        key, value = prefix + spec.name, getattr(node, spec.name)
        if dataclasses.is_dataclass(value):
            yield from leaves(value, f"{key}.")
        else:
            yield key, spec, value, node
            for name, entry in value.items() if isinstance(value, dict) else ():
                if dataclasses.is_dataclass(entry):
                    yield from leaves(entry, f"{key}.{name}.")


def values_are_what_the_schema_takes(job: Job) -> Iterator[Fault]:
    """Values are within their ranges and choices, and a key is set only if the chosen option of its group reads it.

    The user's modules, which can add choices, were imported when the job was typed.
    """
    for key, spec, value, section in leaves(job):
        choices, range, only = spec.metadata["choices"], range_of(spec), spec.metadata["only"]
        for element in elements(value):
            if isinstance(element, list | dict):
                yield Fault(key, value, "must be a list of words, not of lists or tables")
            elif choices and element not in choices:
                reason = "not one of the choices" if element is value else f"{element} is not one of the choices"
                if isinstance(choices, Names) and not suggest(str(element), choices):
                    reason += f"; one of your own needs train.imports={as_typed([*job.train.imports, 'ITS_MODULE'])}"
                yield Fault(key, value, reason, tuple(choices))
            elif range and isinstance(element, str) is isinstance(range, Text) and (reason := range.objection(element)):
                yield Fault(key, element, reason, range.nearest(element) if isinstance(range, Interval) else ())
        if only and section.name not in only and value != default_of(spec):
            group = key.rpartition(".")[0]
            chosen = group if "." not in group else f"{group}.name"
            yield Fault(key, value, f"{chosen}={section.name} does not read it; {' or '.join(only)} would")


def elements(value: Any) -> Iterator[Any]:
    """Yield what ranges and choices apply to: the value, the elements of a list, or the names and values of a table."""
    if isinstance(value, dict):
        for name, entry in value.items():
            yield name
            yield from elements(entry)
    elif isinstance(value, list):
        yield from value
    elif value is not None and not dataclasses.is_dataclass(value):
        yield value


def _types(cls: Any) -> dict[str, Any]:
    """Return the types of a section's keys; a constant of its class is none."""
    return {name: kind for name, kind in typing.get_type_hints(cls).items() if typing.get_origin(kind) is not typing.ClassVar}


_hints: Callable[[Any], dict[str, Any]] = functools.cache(_types)


def _entry(kind: Any) -> Any:
    """Return the dataclass of a dict's values, as in dict[str, Part]; None if there is none."""
    values = typing.get_args(kind)[1:] if typing.get_origin(kind) is dict else ()
    return next((value for value in values if dataclasses.is_dataclass(value)), None)


def _key_faults(cls: type, data: dict[str, Any], prefix: str, needed: dict[str, Any] | None = None) -> Iterator[Fault]:
    """Yield a fault for each key that the schema lacks (added with `+`), that was deleted (`~`), or that has no value.
    Only the keys of `needed` must be there, if it is given: then the others, and those of sections within, get their
    defaults later.
    """
    hints = _hints(cls)
    for name, value in data.items():
        if name not in hints:
            # of a model's family, which need not be those of other families
            own = (f"{prefix}{name}" for name in hints)
            yield Fault(prefix + name, value, "no such key", legal=suggest(prefix + name, own if issubclass(cls, Model) else known_keys()))
        elif dataclasses.is_dataclass(hints[name]) and isinstance(value, dict):
            inner = families()[value["family"]].config if hints[name] is Model else hints[name]
            yield from _key_faults(inner, value, f"{prefix}{name}.", None if needed is None else {})
        elif dataclasses.is_dataclass(hints[name]):
            yield Fault(prefix + name, value, "needs its keys; it cannot be a single value")
        elif (entry := _entry(hints[name])) and isinstance(value, dict):
            for key, inner in value.items():
                yield from _key_faults(entry, inner, f"{prefix}{name}.{key}.")
        elif value == "???":
            yield Fault(prefix + name, value, "no value given")
    for name in (hints if needed is None else needed).keys() - data.keys():
        yield Fault(prefix + name, None, "is needed and cannot be deleted")
