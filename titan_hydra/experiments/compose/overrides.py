"""Find the mistakes in the overrides of a command line before Hydra composes them. Each mistake gives one line that names
what would be right.
"""

import dataclasses
import re
import typing
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from titan_hydra.core.job.config.fault import as_value, did_you_mean, quoted, shown
from titan_hydra.core.job.config.field import converted, type_fault, wanted
from titan_hydra.core.job.config.files import CONF, default_options, unusable_options
from titan_hydra.core.job.config.load import PICKED, holder_of, kind_of, known_keys
from titan_hydra.core.job.config.schema import EPOCH

from .meant import meant_by, suggest_option
from .scan import misread_options, takes_text

# maximum length of an override in characters; with longer overrides Hydra's parser takes seconds or crashes
LONGEST = 20_000
NOT_OURS = {  # keys of Hydra for features that this program has in another form
    "hydra/launcher": "cells are started by this program itself; use cluster=slurm (or cluster=local)",
    "hydra/sweeper": "cells are composed by this program itself; -m with values or range() makes them, or a search draws them (see search)",
    "hydra.sweeper": "cells are composed by this program itself; see search and launch",
    "hydra.job.chdir": "nothing changes the folder here; paths are those of the folder in which the line is typed",
    "hydra.job.env_set": "has no effect here; the shell sets the variables of launch.py, cluster.environment those of ranks",
    "hydra.callbacks": "are not called here; titan status -f follows cells, and launch.wait=true waits for them",
    "hydra.run.dir": "Hydra writes nothing here; paths.runs is the folder of runs",
    "hydra.sweep.dir": "see paths.runs",
    "hydra.sweep.subdir": "see paths.runs and name",
    "hydra.launcher": "cells are started by this program itself; see cluster and launch",
    "hydra.job.name": "has no effect here; name and sweep.name name runs and sweeps",
    "hydra.job.env_copy": "has no effect here; cluster.environment sets the variables of ranks",
    "hydra.output_subdir": "Hydra writes nothing here; a run's config.json has the configuration",
}
ELSEWHERE = {  # devices for which `hardware` has no option, because this package does not run on them
    r"mi\d|amd|rocm|radeon": "AMD's GPUs are not supported: nothing here has run on ROCm (`titan plan` knows mi300x)",
    r"tpu|v[2-7][ep]?$": "TPUs are not supported: PyTorch's distributed parts used here run on CUDA GPUs and CPUs; see docs/coming-from.md",
    r"gaudi|hpu|trn|trainium|inferentia|m[1-9]|mps": "is not supported: training runs on NVIDIA's GPUs and on CPUs",
}


def mistakes(overrides: Sequence[str], folders: Sequence[Path] = (CONF,)) -> list[str]:
    """Return one line for each wrong override, and for each unusable file in the user's folders (all of `folders`
    except the first).

    Options are looked up in `folders`; syntax that only Hydra understands is not checked.
    """
    # a user's options or modules may register a part with its own keys
    may_add_keys = len(folders) > 1 or any("train.imports" in text for text in overrides)
    files = [line for folder in folders[1:] for line in unusable_options(folder)]
    return files + [
        line
        for words in _put_together(overrides)
        if (line := _split_at_blanks(words) if len(words) > 1 else _mistake(words[0], folders, may_add_keys))
    ]


def steps_of_a_fake_rank(overrides: Sequence[str]) -> list[str]:
    """Return a line for each number of steps that is typed beside comm=fake, which makes one step."""
    steps = [word for word in overrides if re.match(r"\+*steps=(?!1$)", word) and "comm=fake" in overrides]
    return [f"{shown(word)}: comm=fake makes one step, with nothing computed; nearest legal: 1" for word in steps]


def _put_together(overrides: Sequence[str]) -> list[list[str]]:
    """Return the overrides, each as a list of one word; of several where the shell has split one at blanks, as in
    `seed=1, 2` and `optimizer.lr = 1e-3`.
    """
    groups: list[list[str]] = []
    for word in overrides:
        last = "".join(groups[-1]) if groups else ""
        in_brackets = any(last.count(start) > last.count(end) for start, end in ("[]", "{}", "()"))
        continues = word.startswith(("=", ",")) or ("=" not in word and (in_brackets or last.endswith((",", "="))))
        if last and len(last) < LONGEST and continues:
            groups[-1].append(word)
        else:
            groups.append([word])
    return groups


def _split_at_blanks(parts: list[str]) -> str:
    return f"{shown(' '.join(parts))}: the shell splits it at its blanks; type it without them, as {shown(quoted([''.join(parts)]))}"


def _mistake(text: str, folders: Sequence[Path], may_add_keys: bool) -> str | None:
    """Return the line that says what is wrong with an override; None if nothing is. `may_add_keys` says whether the user's
    modules may add keys that are not known yet.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    if len(text) > LONGEST:
        return f"{shown(text, 60)}: an override has at most {LONGEST:,} characters"
    try:
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError) as error:
        return f"{shown(text)}: {_unreadable(text, error)}"
    key, add = override.key_or_group, override.is_add() or override.is_force_add()
    if re.match(r"hydra([./]|$)", key):
        return _without_effect(text, key, override.value())
    if not key:
        return f"{shown(text)}: is not KEY=VALUE"
    if len(key) > 200:
        return f"{shown(key, 60)}: no such key or group"
    if not override.is_sweep_override():
        values = [override.value()]
    # a glob gives only names that exist
    elif override.is_discrete_sweep() and override.value_type.name != "GLOB_CHOICE_SWEEP":
        values = [getattr(value, "text", value) for value in islice(override.sweep_iterator(), 1000)]
    else:
        values = []
    if override.package is not None or (may_add_keys and kind_of(key) is None and holder_of(key)[0] in PICKED):
        return None  # `read` checks the keys of the selected part later
    if any((folder / key).is_dir() for folder in folders):
        if override.is_delete():
            return (
                f"~{key}: a group needs an option; choose one with {key}=OPTION" if default_options().get(key) else None
            )
        wrong = next(filter(None, (_wrong_option(key, value, add, folders) for value in values)), None)
        lines = [line for value in values for line in misread_options(key, str(value), folders)]
        return wrong or "\n".join(dict.fromkeys(lines)) or None
    if override.is_delete() and kind_of(key) is not None:
        return f"~{key}: every key is needed; give it another value with {key}=VALUE" if key in known_keys() else None
    return next(filter(None, (_wrong_value(key, value, override, folders, may_add_keys) for value in values)), None)


def _without_effect(text: str, key: str, value: Any) -> str | None:
    """Return why a key of Hydra's own cannot be used here; None for hydra.mode, and for what is so already."""
    reason = next(
        (reason for start, reason in NOT_OURS.items() if key.startswith(start)),
        "a setting of Hydra's own, which has no effect here",
    )
    return None if key == "hydra.mode" or value in ("basic", "none") else f"{shown(text)}: {reason}"


def _unreadable(text: str, error: BaseException) -> str:
    """Explain why Hydra's parser rejects an override."""
    if "=" not in text:
        chosen = [f"{group}={text}" for group in default_options() if (CONF / group / f"{text}.yaml").is_file()]
        return "is not KEY=VALUE" + did_you_mean(chosen[:1])
    if isinstance(error, RecursionError):
        return "is nested too deeply"
    if not isinstance(error, ValueError) or "digits" not in str(error):
        key, _, value = text.partition("=")
        message = shown(str(error).splitlines()[0], 80)
        if value.endswith(",") and not value.startswith(("[", "{", "'", '"')):
            return f"ends with a comma; several values are typed as {shown(key)}=VALUE,VALUE"
        if "interval(" in value:
            return f"an interval has two bounds that are numbers, as interval(1e-4,1e-1) ({message})"
        if re.fullmatch(r"[\w./]+", key) and not value.startswith(("[", "{", "'", '"')):  # the value is a text
            return f"cannot be parsed ({message}); as a text it is typed {quoted([f'{key}={as_value(value)}'])}"
        return f"cannot be parsed; quote what the shell or Hydra would read otherwise ({message})"
    return "has too many digits"


def _wrong_option(group: str, value: Any, add: bool, folders: Sequence[Path]) -> str | None:
    """Return what is wrong with choosing this option in a group; None if nothing is."""
    if isinstance(value, dict):
        return f"{group}: takes the name of an option; single keys are set one by one, as {group}.KEY=VALUE"
    if isinstance(value, list):
        return f"{group}: takes one option, not a list"
    names = sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})
    typed = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if add and group in default_options():
        return f"+{group}: the group is in the defaults already; write {group}=OPTION without +"
    if not add and group == "sweeps":
        return "sweeps: a file of sweeps/ is added to the configuration; write +sweeps=NAME"
    legal = isinstance(value, str) and re.fullmatch(r"[\w+-][\w.+-]*(/[\w+-][\w.+-]*)*", value) and len(value) < 200
    if legal and any((folder / group / f"{value}.yaml").is_file() for folder in folders):
        return None
    if group == "hardware" and (
        maker := next((why for pattern, why in ELSEWHERE.items() if re.match(pattern, typed, re.I)), None)
    ):
        return f"{group}={shown(typed)}: {maker} (options of {group}: {', '.join(names)})"
    if legal and (
        other := next((path for folder in folders if (path := folder / group / f"{value}.yml").exists()), None)
    ):
        return f"{group}={value}: Hydra reads only files that end in .yaml; rename {other}"
    hint = did_you_mean(suggest_option(typed, names))
    return f"{group}={shown(typed)}: no such option{hint} (options of {group}: {', '.join(names)})"


def _wrong_value(key: str, value: Any, override: Any, folders: Sequence[Path], may_add_keys: bool) -> str | None:
    """Return what is wrong with a key or with the value given to it; None if nothing is."""
    kind, add = kind_of(key), override.is_add() or override.is_force_add()
    if kind is None:
        return unknown_key(key, value, override.input_line.partition("=")[2] if key == override.key_or_group else "")
    if override.is_add() and key in known_keys() and not isinstance(value, dict | list):
        return f"+{key}: the key exists already; write {key}=VALUE without +"
    if not add and typing.get_origin(kind) is dict and isinstance(value, dict) and value:
        return f"{key}: add to it with a plus, as +{key}={{NAME: VALUE}}"
    if not add and key not in known_keys():
        return f"{key}: names of your own are added with a plus, as +{shown(override.input_line)}"
    if dataclasses.is_dataclass(kind) and isinstance(value, dict):
        return next(
            filter(
                None,
                (
                    _wrong_value(f"{key}.{name}", inner, override, folders, may_add_keys)
                    for name, inner in value.items()
                ),
            ),
            None,
        )
    if dataclasses.is_dataclass(kind):
        first = dataclasses.fields(kind)[0].name
        return f"{key}={shown(str(value))}: is a group of keys, which are set one by one, as {key}.{first}=VALUE"
    group, _, last = key.rpartition(".")
    names = (
        sorted({file.stem for folder in folders for file in (folder / group).glob("*.yaml")})
        if last == "name" and group
        else []
    )
    if names and not may_add_keys and isinstance(value, str) and value not in names:
        return f"{key}={shown(value)}: is the name of the chosen option; choose one with {group}=OPTION ({', '.join(names)})"
    if "${" in str(value) or value == "???" or (key, value) == ("steps", EPOCH):
        return None  # `read` has the value
    try:
        converted(kind, value)
    except ValueError:
        return str(type_fault(key, kind, value, known_keys().get(key)))
    return _read_otherwise(key, value, override.input_line) if takes_text(key) else None


def _read_otherwise(key: str, value: Any, line: str) -> str | None:
    """Return what is wrong with a value of a key that takes a text, if Hydra reads a number or a truth value and its text
    is another one than was typed.
    """
    if isinstance(value, dict | list):
        inner = [*value, *value.values()] if isinstance(value, dict) else value
        return next(filter(None, (_read_otherwise(key, item, line) for item in inner)), None)
    if not isinstance(value, int | float) or re.search(rf"(?<![\w.+-]){re.escape(str(value))}(?![\w.+-])", line):
        return None
    typed = line.partition("=")[2]
    whole = bool(re.fullmatch(r"[\w.+-]+", typed))
    as_text = quoted([f'{key}="{typed}"']) if whole else "it in double quotes, inside single ones for the shell"
    return f"{shown(line)}: {key} takes a text, and Hydra reads {typed if whole else 'one'} as {value}; write {as_text}"


def unknown_key(key: str, value: Any = None, typed: str = "") -> str:
    """Return the message for a key or group that does not exist, with the overrides that were probably meant: with the
    value as it was typed, if it suits them.
    """
    above = key.rpartition(".")[0]
    if not dataclasses.is_dataclass(kind_of(above)) and kind_of(above) is not None:
        return f"{shown(key)}: {above} is {wanted(kind_of(above), known_keys().get(above))}, and has no keys below it"
    return f"{shown(key)}: no such key or group" + did_you_mean(
        meant_by(key, value, typed), otherwise="; `python launch.py --help` lists them"
    )
