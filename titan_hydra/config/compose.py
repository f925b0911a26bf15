"""The schema in Hydra's ConfigStore, and Hydra's errors in one line each."""
from __future__ import annotations

import atexit
import copy
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checks import check
from .fault import Fault, suggest
from .load import freeze, known_keys, read
from .schema import Job
from .status import ConfigError

CONF = Path(__file__).parents[2] / "conf"


def register_schema() -> None:
    """Let conf/config.yaml start from the typed schema. Call before Hydra composes; calling again changes nothing."""
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    ConfigStore.instance().store(name="schema", node=Job)
    OmegaConf.register_new_resolver("scratch", _scratch, use_cache=True, replace=True)
    OmegaConf.register_new_resolver("describe", _describe, replace=True)  # looked up by --help alone


def compose_quickly() -> None:
    """Let Hydra read each of the 30 files of a cell once in this process, not once a cell, and compose each cell of -m once, not twice.

    It composes all cells beforehand since a launcher may start them elsewhere, later; ours checks them all in this process anyway.
    """
    from hydra._internal.config_repository import ConfigRepository
    from hydra.plugins.sweeper import Sweeper

    known: dict[tuple, Any] = {}
    load = ConfigRepository.load_config

    def load_once(self: ConfigRepository, config_path: str) -> Any:
        file = (config_path, *(source.path for source in self.get_sources()))
        if file not in known:
            known[file] = load(self, config_path)
        return copy.deepcopy(known[file])  # Hydra changes what it is given

    if load.__name__ != "load_once":
        ConfigRepository.load_config = load_once
        Sweeper.validate_batch_is_legal = lambda self, batch: None


def _scratch() -> str:
    """A folder for what Hydra's sweeper insists on writing; it is gone when the process ends."""
    folder = tempfile.mkdtemp(prefix="titan_hydra_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _describe() -> str:
    """The groups and keys, for `python launch.py --help`; Hydra's template would read a dollar sign."""
    from .describe import help_text

    return help_text().replace("$", "$$")


def compose_job(*overrides: str) -> Job:
    """Compose, freeze and check one job from this checkout's conf/, for programs other than launch.py. Raises ConfigError."""
    job = freeze(compose_unchecked(*overrides))
    if faults := check(job):
        raise ConfigError("\n".join(map(str, faults)))
    return job


def compose_unchecked(*overrides: str) -> Job:
    """Compose and type one job, as it is before it is frozen. Raises ConfigError for keys and options that do not exist."""
    from hydra import compose, initialize_config_dir
    from hydra.errors import HydraException

    register_schema()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            job, faults = read(compose("config", list(overrides)))
    except (HydraException, ValueError) as error:
        if (line := explain(error, overrides)) is None:
            raise
        raise ConfigError(line) from error
    if faults:
        raise ConfigError("\n".join(map(str, faults)))
    return job


def explain(error: BaseException, overrides: Sequence[str] = ()) -> str | None:
    """What is wrong on the command line, in one line, from an exception of Hydra or OmegaConf; None if it is not one of theirs."""
    from hydra.errors import HydraException, OverrideParseException
    from omegaconf.errors import OmegaConfBaseException

    chain = [error]
    while (chain[-1].__cause__ or chain[-1].__context__) and len(chain) < 8:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    if "Config group override must be a string" in str(error):  # it does not say which
        return next(filter(None, map(_no_option, overrides)), str(error))
    if not any(isinstance(link, HydraException | OmegaConfBaseException) for link in chain):
        return None
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be parsed; quote what the shell or Hydra would read otherwise ({str(error).splitlines()[0]})"
    text = "\n".join(str(link) for link in chain)
    for pattern, line in PATTERNS:
        match = re.search(pattern, text, re.S)
        if match:
            return line(*match.groups())
    return str(error).strip().splitlines()[0]


def _no_option(override: str) -> str | None:
    """What is wrong with an override that gives a group a number, true, false or null; None if it does not."""
    group, _, value = override.lstrip("+").partition("=")
    options = sorted(file.stem for file in CONF.joinpath(group).glob("*.yaml"))
    wrong = [part for part in value.split(",") if re.fullmatch(r"true|false|null|[-+.\de]+", part, re.I)]
    return _unknown_option(group, wrong[0], "\n".join(options)) if options and wrong else None


def _unknown_key(key: str, *_: str) -> str:
    if key == "sweeps":
        return "sweeps: a file of sweeps/ is added to the configuration; write +sweeps=NAME"
    if key in known_keys():  # a table of the user's own names, which Hydra takes for keys that are not there
        return f"{key}: add to it with a plus, as +{key}={{NAME: VALUE}}"
    groups = {name for name in known_keys() if "." not in name} | {"experiment"}
    legal = suggest(key, known_keys() | dict.fromkeys(groups))
    return f"{key}: no such key or group" + (f"; did you mean {' or '.join(legal)}?" if legal else "; `python launch.py --help` lists them")


def _unknown_option(group: str, option: str, options: str) -> str:
    names = [line.strip() for line in options.strip().splitlines() if line.strip()]
    close = suggest(option, names)
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    return f"{group}={option}: no such option{hint} (options of {group}: {', '.join(names)})"


def _bad_value(value: str, kind: str, key: str) -> str:
    spec = known_keys().get(key)
    return str(Fault(key, value, f"is not a valid {kind.lower()}")) + (f" ({spec.metadata['help']})" if spec else "")


PATTERNS = [
    (r"Error merging override ([\w.]+)=([^\n]*)\n(?:field '\w+' is not Optional|Cannot convert)",
     lambda key, value: _bad_value(value, str(getattr(known_keys().get(key), "type", "value")), key)),
    (r"Could not find '([^'/]+(?:/[^'/]+)*)/([^'/]*)'\s+Available options in '[^']+':\n(.*?)(?:\nConfig search path|$)", _unknown_option),
    (r"Multiple values for (\w+)\.", lambda group: f"+{group}: the group is in the defaults already; write {group}=OPTION without +"),
    (r"In '([^']+)': \w+ raised.*?full_key: (sweep\.cells[^\n]*)",
     lambda file, key: f"{file}.yaml: {key}: a cell has a name and a list of overrides; quote an override that holds a comma"),
    (r"Ambiguous value for argument '([^']+)'", lambda override: f"{override}: several values need -m, or brackets where they are a list"),
    (r"Value '(.*?)'.* (?:could not be converted to|is incompatible with type hint) '?([\w.\[\], |]+?)'?\n"
     r".*?full_key: ([\w.\[\]]+)", _bad_value),
    (r"Could not override '([^']+)'", _unknown_key),
    (r"Key '[^']+' (?:is )?not in .*?full_key: ([\w.]+)", _unknown_key),
    (r"Could not append to config\. An item is already at '([^']+)'",
     lambda key: f"+{key}: the key exists already; write {key}=VALUE without +"),
    (r"Could not delete from config\. '([^']+)' does not exist", _unknown_key),
    (r"In '([^']+)': \w+ raised while composing config:\n([^\n]+)(?:\n\s+full_key: ([^\n]+))?",
     lambda file, reason, key: f"{file}.yaml: {f'{key}: ' if key else ''}{reason}"),
    (r"Interpolation key '([^']+)' not found", lambda key: f"${{{key}}}: an interpolation names a key that does not exist"),
]
