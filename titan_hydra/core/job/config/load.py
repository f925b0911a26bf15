"""Turn a composed Hydra configuration into a typed `Job`, and compute its identity."""

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Callable, Iterator
from typing import Any

from .family import FAMILIES, family_named, unknown_family
from .fault import Fault, as_typed, suggest
from .field import Changes, converted, not_a_choice, type_fault, value_faults
from .field import key as described
from .model import Model
from .operation import Cluster, Metrics, Search, Validation
from .ranges import LARGEST
from .registry import (
    ACTIVATION_CHECKPOINTS,
    ADAPTERS,
    CP_ROTATIONS,
    DATA_SOURCES,
    EXECUTORS,
    FORMATS,
    LR_SCHEDULES,
    OBJECTIVES,
    OPTIMIZERS,
    PARAMETRIZATIONS,
    PIPELINE_SCHEDULES,
    SEARCHES,
    TRACKERS,
    Registry,
)
from .schema import (
    EPOCH,
    UNCOUNTED,
    ActivationCheckpoint,
    Adapter,
    Job,
    LrSchedule,
    Objective,
    Optimizer,
    Parallelism,
    Parametrization,
    PipelineSchedule,
    Precision,
    Train,
    default_of,
)
from .source import Data, Part
from .user_code import load_user_modules, require_user_modules

# Sections that select a part, such as an optimizer, and hold the part's keys. For each section: the key that selects
# the part, and all parts.
PICKED: dict[Any, tuple[str, Registry[Any]]] = {
    Model: ("family", FAMILIES),
    Data: ("name", DATA_SOURCES),
    Part: ("name", DATA_SOURCES),
    Objective: ("name", OBJECTIVES),
    Optimizer: ("name", OPTIMIZERS),
    LrSchedule: ("name", LR_SCHEDULES),
    ActivationCheckpoint: ("name", ACTIVATION_CHECKPOINTS),
    PipelineSchedule: ("name", PIPELINE_SCHEDULES),
    Parallelism: ("cp_rotate", CP_ROTATIONS),
    Precision: ("converter", FORMATS),
    Adapter: ("name", ADAPTERS),
    Parametrization: ("name", PARAMETRIZATIONS),
    Metrics: ("trackers", TRACKERS),  # selects several parts; each has its own section inside this one
    Cluster: ("executor", EXECUTORS),
    Search: ("name", SEARCHES),
}
Sections = tuple[tuple[Any, tuple[Any, ...]], ...]  # pairs of a section in PICKED and the dataclasses that may type it


def to_dict(job: Any) -> dict[str, Any]:
    """Return a (nested) dataclass as plain dicts, lists and scalars, the form of config.json."""
    return dataclasses.asdict(job)


def from_dict(cls: Any, data: dict[str, Any]) -> Any:
    """Build a dataclass from what `to_dict` returned. For a job, the user's modules are imported first; a section gets the
    keys of the part that it selects.

    Raises KeyError for a missing section and TypeError for an unknown key. They get no message for users, as this
    program writes config.json. Raises ConfigError if a module cannot be imported or the family is not registered.
    """
    if cls is Job:
        require_user_modules(data["train"]["imports"])
    if cls is Validation and data["name"] == "off":
        return cls()  # an option of `data` may have set validation.steps, which has no effect here
    cls = typed(cls, data)
    values = dict(data)
    for spec in dataclasses.fields(cls):
        kind, entry = _hints(cls)[spec.name], spec.metadata["entry"]
        if dataclasses.is_dataclass(kind) and (spec.name in values or spec.metadata["identity"] != "if set"):
            values[spec.name] = from_dict(kind, values[spec.name])
        elif entry and spec.name in values:
            values[spec.name] = {name: from_dict(entry, value) for name, value in values[spec.name].items()}
    return cls(**values)


def typed(section: Any, values: dict[str, Any]) -> Any:
    """Return the dataclass of a section with these values. It has the keys of the part that the section selects, if any.
    Raises ConfigError if there is no such family.
    """
    if section is Model:
        return family_named(values["family"]).config
    if section not in PICKED:
        return section
    pick, parts = PICKED[section]
    picked = values.get(pick)
    if isinstance(picked, list):
        return _with_sections(
            section, tuple((name, part.config) for name, part in parts.items() if name in picked and part.config)
        )
    record = parts.get(picked)
    return section if record is None else _joined(section, record.config)


def picked_anew(values: Any, picked: str | list[str]) -> Any:
    """Return a copy of a section that selects other parts. Keys that the old and new parts share keep their values."""
    section = next(section for section in PICKED if isinstance(values, section))
    pick = PICKED[section][0]
    cls = typed(section, {pick: picked})
    shared = {spec.name: getattr(values, spec.name) for spec in dataclasses.fields(cls) if hasattr(values, spec.name)}
    return cls(**{**shared, pick: picked})


@functools.cache
def _joined(section: Any, of_part: Any) -> Any:
    """Return a section's dataclass with the keys of a part."""
    if of_part is None or issubclass(of_part, section):
        return of_part or section
    return dataclasses.make_dataclass(f"{section.__name__}Of{of_part.__name__}", [], bases=(section, of_part))


@functools.cache
def _with_sections(section: Any, parts: tuple[tuple[str, Any], ...]) -> Any:
    """Return a section's dataclass, extended by a section for each of these parts, given by name and dataclass."""
    if not parts:
        return section
    fields = [(name, config, described(config, f"keys of {name}", identity=False)) for name, config in parts]
    return dataclasses.make_dataclass(f"{section.__name__}Of{''.join(dict(parts))}", fields, bases=(section,))


def read(config: Any) -> tuple[Job | None, list[Fault]]:
    """Turn one composed cell (an OmegaConf DictConfig) into a job. Return the job, or None and the faults.

    Only keys and single values are checked here; `check` examines how values fit together.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        data: Any = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        return None, [Fault(error.full_key, _as_written(config, error.full_key), str(error).splitlines()[0])]
    faults = _import_faults(data) or list(_steps_of_an_epoch(data)) or list(give_types(Job, data, ""))
    if faults:
        return None, faults
    job = from_dict(Job, data)
    faults = list(values_are_what_the_schema_takes(job))
    return (None, faults) if faults else (job, [])


def _steps_of_an_epoch(data: dict[str, Any]) -> Iterator[Fault]:
    """Replace steps=epoch, in place, by values that `freeze` replaces by numbers. Yield a fault if the number of samples is
    given.
    """
    samples = data["data"].get("samples") if isinstance(data.get("data"), dict) else None
    if samples is not None:
        yield Fault("data.samples", samples, "steps=epoch fills it in", (None,))
    elif data.get("steps") == EPOCH and isinstance(data.get("data"), dict):
        data["steps"], data["data"]["samples"] = LARGEST, UNCOUNTED  # with the most steps, no other key is too large


def _import_faults(data: dict[str, Any]) -> list[Fault]:
    """Import the user's modules, which may register parts with keys of their own. Return the faults of their list."""
    train = data.get("train")
    if not isinstance(train, dict) or "imports" not in train:
        return []  # `give_types` reports the missing key
    kind, spec = _hints(Train)["imports"], Train.__dataclass_fields__["imports"]
    try:
        return load_user_modules(converted(kind, train["imports"]))
    except ValueError:
        return [type_fault("train.imports", kind, train["imports"], spec)]


def give_types(section: Any, values: dict[str, Any], prefix: str, needed: bool = True) -> Iterator[Fault]:
    """Give the values of a section their types, and the keys of the parts that it selects their defaults, in place. Yield
    a fault for each value of another type, for each key that the schema lacks (added with `+`), and for each that has no
    value, or that was deleted (`~`) though the section has it with every part; a section has none such unless `needed`.
    """
    pick = PICKED[section][0] if section in PICKED else None
    if pick and (fault := _wrong_part(section, values, prefix)):
        yield fault
        return
    cls = typed(section, values)
    hints, always = _hints(cls), _hints(section) if needed else {}
    yield from (no_such_key(cls, prefix, name, value, values) for name, value in values.items() if name not in hints)
    for spec in dataclasses.fields(cls):
        name, kind, key = spec.name, hints[spec.name], prefix + spec.name
        if name not in values and name in always:
            yield Fault(key, None, "is needed and cannot be deleted")
            continue
        inside = dataclasses.is_dataclass(kind)
        value = values[name] if name in values else {} if inside else default_of(spec)
        if inside and isinstance(value, dict):
            values[name] = value
            yield from give_types(kind, value, f"{key}.", needed and not pick)
        elif inside:
            yield Fault(key, value, "needs its keys; it cannot be a single value")
        elif value == "???":
            yield Fault(key, value, "no value given")
        else:
            try:
                values[name] = converted(kind, value)
            except ValueError:
                yield type_fault(key, kind, value, spec)
                continue
            for entry_name, entry in value.items() if (of := spec.metadata["entry"]) and value else ():
                if isinstance(entry, dict):
                    yield from give_types(of, entry, f"{key}.{entry_name}.")
                else:
                    yield Fault(f"{key}.{entry_name}", entry, "needs its keys; it cannot be a single value")


def _wrong_part(section: Any, values: dict[str, Any], prefix: str) -> Fault | None:
    """Return the fault of the key that selects a section's part, if there is no such part."""
    pick, parts = PICKED[section]
    spec, kind, picked = section.__dataclass_fields__[pick], _hints(section)[pick], values.get(pick)
    if section is Model and (not isinstance(picked, str) or picked not in parts):
        return unknown_family(picked)
    if pick not in values:
        return None  # `give_types` reports it
    try:
        values[pick] = converted(kind, picked)
    except ValueError:
        return type_fault(prefix + pick, kind, picked, spec)
    choices = spec.metadata["choices"]
    if not choices or picked == "???" or not isinstance(values[pick], str) or values[pick] in choices:
        return None
    return not_a_choice(prefix + pick, picked, picked, choices)


def _as_written(config: Any, key: str) -> Any:
    """Return the value of a key before its interpolation is resolved."""
    from omegaconf import OmegaConf

    value = OmegaConf.to_container(config, resolve=False)
    for part in key.split("."):
        value = value.get(part, "?") if isinstance(value, dict) else "?"
    return value


def defaults(section: Any) -> dict[str, Any]:
    """Return the defaults of all keys of a section, as plain values."""
    hints = _hints(section)
    return {
        spec.name: defaults(hints[spec.name]) if dataclasses.is_dataclass(hints[spec.name]) else default_of(spec)
        for spec in dataclasses.fields(section)
    }


def identity(job: Job) -> str:
    """Return 8 hex digits of the sha256 of the configuration, without the keys that are not part of the experiment."""
    return hashlib.sha256(json.dumps(_identity_part(job), sort_keys=True).encode()).hexdigest()[:8]


def _identity_part(node: Any) -> dict[str, Any]:
    """Return the keys of a section that are part of a run's identity. A key that was added later counts only if it
    differs from its default, so that older runs keep their hash.
    """
    part: dict[str, Any] = {}
    for spec in dataclasses.fields(node):
        value = getattr(node, spec.name)
        if isinstance(value, dict):
            value = {
                key: _identity_part(entry) if dataclasses.is_dataclass(entry) else entry for key, entry in value.items()
            }
        if spec.metadata["identity"] is True or (spec.metadata["identity"] and value != default_of(spec)):
            part[spec.name] = _identity_part(value) if dataclasses.is_dataclass(value) else value
    return part


def known_keys() -> dict[str, dataclasses.Field[Any]]:
    """Return every dotted key and its field, in order; keys of all parts are included. Do not change the cached result."""
    return _keys(Job, "", _sections())


def changes_of(key: str) -> tuple[str, Changes]:
    """Return (name of a field, what changes with the value of a dotted key). The field is the one that states
    `changes`: the key itself, or its section, if only the section states it. A key below a name that the user chose
    (data.mixture.web.weight) counts as the key above the name. A key outside the hash changes the technique, unless it
    states something else. A key that is in no schema changes the same as its section.
    """
    return _changes(key, _sections())


@functools.cache
def _changes(key: str, sections: Sections) -> tuple[str, Changes]:
    known, parts = _keys(Job, "", sections), key.split(".")
    names = [name for end in range(len(parts), 0, -1) if (name := ".".join(parts[:end])) in known] or [key]
    if names[0] in known and not known[names[0]].metadata["identity"] and not known[names[0]].metadata["changes"]:
        return names[0], "technique"
    stated = next((name for name in names if name in known and known[name].metadata["changes"]), names[0])
    return stated, known[stated].metadata["changes"] or "learning" if stated in known else "learning"


@functools.cache
def _keys(cls: Any, prefix: str, sections: Sections) -> dict[str, dataclasses.Field[Any]]:
    """Return all keys below a dataclass by their full names. `sections` lists, for a section whose `name` picks a part,
    the dataclasses of all its parts.
    """
    keys = {}
    for spec in dataclasses.fields(cls):
        keys[prefix + spec.name] = spec
        kind = _hints(cls)[spec.name]
        if dataclasses.is_dataclass(kind):
            for inner in dict(sections).get(kind, (kind,)):
                for name, field in _keys(inner, f"{prefix}{spec.name}.", sections).items():
                    keys.setdefault(name, field)  # a key that all parts share is listed once
    return keys


def picking() -> dict[str, Any]:
    """Return the sections of a job that select a part, by name."""
    return {name: section for name, section in _hints(Job).items() if section in PICKED}


def _sections() -> Sections:
    """Return the dataclasses that may type each section of PICKED: its own, then one with the keys of each part."""
    return tuple((section, (section, *_typings(section))) for section in PICKED)


def _typings(section: Any) -> list[Any]:
    """Return the dataclasses that type a section with the keys of its parts."""
    parts = PICKED[section][1]
    if section is Metrics:
        return [
            _with_sections(section, tuple((name, record.config) for name, record in parts.items() if record.config))
        ]
    return list(dict.fromkeys(_joined(section, record.config) for record in parts.values() if record.config))


def owners(key: str) -> list[str]:
    """Return the names of the parts that have this key; none if the section has the key with every part."""
    group, _, name = key.partition(".")
    section, name = picking().get(group), name.partition(".")[0]
    return [] if section is None or name in _hints(section) else _parts_with(section, name)


def _parts_with(section: Any, name: str) -> list[str]:
    """Return the names of the parts that give a section this key when they are selected."""
    parts = PICKED[section][1]
    if section is Metrics:
        return [name] if name in parts and parts[name].config else []
    return [part for part, record in parts.items() if record.config and name in _hints(record.config)]


def kind_of(key: str) -> Any:
    """Return the type of a dotted key, which may be below a name that the user chose; None if there is no such key."""
    return _kind(key, _sections())[0]


def holder_of(key: str) -> tuple[Any, str]:
    """Return the innermost dataclass that contains a dotted key, and the rest of the key after this dataclass."""
    return _kind(key, _sections())[1:]


@functools.cache
def _kind(key: str, sections: Sections) -> tuple[Any, Any, str]:
    """Resolve a key: return its type (None if there is no such key), the dataclass that has it or lacks it, and the
    name of its last part there.
    """
    kind, entry, holder, rest = Job, None, Job, key
    for index, part in enumerate(parts := key.split(".")):
        if dataclasses.is_dataclass(kind):
            candidates = dict(sections).get(kind, (kind,))
            holder = next((cls for cls in candidates if part in _hints(cls)), None)
            if holder is None:
                return None, kind, part
            rest, spec = ".".join(parts[index:]), holder.__dataclass_fields__[part]
            kind, entry = _hints(holder)[part], spec.metadata["entry"]
        elif typing.get_origin(kind) is dict:
            kind, entry = entry or typing.get_args(kind)[1], None
        elif kind is not Any:
            return None, holder, rest
    return kind, holder, rest


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any, Any]]:
    """Yield every key of a job or of a section that holds a value: dotted name, field, value, and innermost section."""
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
        yield from value_faults(key, spec, value)
        only = spec.metadata["only"]
        if only and section.name not in only and value != default_of(spec):
            group = key.rpartition(".")[0]
            chosen = group if "." not in group else f"{group}.name"
            yield Fault(key, value, f"{chosen}={section.name} does not read it; {' or '.join(only)} would")


def _types(cls: Any) -> dict[str, Any]:
    """Return the types of a section's keys, without constants of its class."""
    hints = typing.get_type_hints(cls).items()
    return {name: kind for name, kind in hints if typing.get_origin(kind) is not typing.ClassVar}


_hints: Callable[[Any], dict[str, Any]] = functools.cache(_types)


def no_such_key(cls: Any, prefix: str, name: str, value: Any, data: dict[str, Any]) -> Fault:
    """Return the fault of a key that a section does not have; the key may belong to another part than the selected one."""
    section = next((section for section in PICKED if issubclass(cls, section)), None)
    if section is None:
        return Fault(prefix + name, value, "no such key", legal=suggest(prefix + name, known_keys()))
    pick, readers = PICKED[section][0], _parts_with(section, name)
    if readers and section is not Model:  # not for families, which share many keys, some of them under other names
        return Fault(
            prefix + name,
            value,
            f"{prefix}{pick}={as_typed(data.get(pick))} does not read it; {' or '.join(readers)} would",
        )
    return Fault(
        prefix + name, value, "no such key", legal=suggest(prefix + name, [f"{prefix}{key}" for key in _hints(cls)])
    )
