"""Find what YAML reads otherwise than it looks in files of options: texts that become numbers or truth values, and names
that are no texts; and mistakes of its syntax, with the file and the line.
"""

from __future__ import annotations

import functools
import re
import typing
from collections.abc import Iterator, Sequence
from os.path import isfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import yaml

from titan_hydra.core.job.config.files import load_yaml
from titan_hydra.core.job.config.load import kind_of

TEXT, NULL = "tag:yaml.org,2002:str", "tag:yaml.org,2002:null"
# whole numbers that nobody writes as such: octal ones, and times of day, which YAML counts in minutes
ODD = r"[-+]?0[0-7_]+|[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?"


@functools.cache
def misread(file: Path, group: str) -> list[str]:
    """Return a line for each text of an option's file that YAML reads as something else, and for a mistake of its
    syntax; each names the file and the line.
    """
    import yaml

    from titan_hydra.core.base.private import get_yaml_loader

    try:
        text = file.read_text(encoding="utf-8-sig")
        loader = get_yaml_loader()(text)
        if (node := loader.get_single_node()) is not None:
            loader.construct_document(node)  # finds a name that stands twice
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        return [f"{file}:{line}: not UTF-8 (the byte 0x{error.object[error.start]:02x}); save the file in UTF-8"]
    except yaml.YAMLError as error:
        return [f"{file}:{mistake_of_yaml(error)}"]
    except OSError:
        return []  # Hydra reports it when the file is chosen
    header = re.match(r"\s*(?:#(?!\s*@package)[^\n]*\n\s*)*#\s*@package\s+(\S+)", text)
    package = header[1] if header else group.replace("/", ".")
    if not header and group in ("sweeps", "experiment"):
        return [f"{file}: sets keys of the whole job, so it needs this line at the top: # @package _global_"]
    prefix = "" if package == "_global_" else f"{package}."
    return [f"{file}:{line}: {reason}" for line, reason in _odd(node, prefix)] if node else []


def mistake_of_yaml(error: yaml.YAMLError) -> str:
    """Return the line and the column of a mistake of YAML's syntax, and what it is."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    position = f"{mark.line + 1}:{mark.column + 1}: " if mark else " "
    problem = getattr(error, "problem", None) or str(error).splitlines()[0]
    advice = "; YAML is indented by blanks, not by tabs" if "'\\t'" in str(problem) else ""
    return f"{position}{problem}{advice}"


def _odd(node: yaml.Node, key: str) -> Iterator[tuple[int, str]]:
    """Yield (line, reason) for each name and value below a node of YAML that is not what it looks like."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if isinstance(name, yaml.ScalarNode) and name.tag not in (TEXT, "tag:yaml.org,2002:merge"):
                yield name.start_mark.line + 1, _read_as(key.rstrip("."), name)
            elif isinstance(name, yaml.ScalarNode) and not (key == "" and name.value == "defaults"):
                yield from _odd(value, f"{key}{name.value}.")
    elif isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            yield from _odd(entry, key)
    elif isinstance(node, yaml.ScalarNode) and node.style is None and node.tag not in (TEXT, NULL):
        name = key.rstrip(".")
        odd = node.tag.endswith((":int", ":float")) and re.fullmatch(ODD, node.value)
        if odd or (takes_text(name) and str(_value(node)) != node.value):
            yield node.start_mark.line + 1, _read_as(name, node)


def takes_text(key: str) -> bool:
    """Whether a key takes a text, or a list or table of texts, and no number."""
    kind = kind_of(key)
    kinds = {kind, *typing.get_args(kind)}
    kinds |= {inner for part in typing.get_args(kind) for inner in typing.get_args(part)}
    return str in kinds and not kinds & {int, float, bool, Any}


def _value(node: yaml.ScalarNode) -> Any:
    import yaml

    from titan_hydra.core.base.private import get_yaml_loader

    return yaml.load(node.value, Loader=get_yaml_loader())


def _read_as(key: str, node: yaml.ScalarNode) -> str:
    value = _value(node)
    read = f"the number {value}" if type(value) in (int, float) else value
    return f'{key}: YAML reads {node.value} as {read}; write "{node.value}" in quotes'


def misread_options(group: str, option: str, folders: Sequence[Path]) -> list[str]:
    """Return the lines of `misread` for the file of an option and for the files that its defaults list names; and a line
    for an option of `cluster` that names no executor, as its cells would run on this machine.
    """
    lines, waiting, seen, named = [], [(group, option)], set(), set()
    while waiting:
        one = waiting.pop()
        # os.path.isfile is false for a name that is too long, where Path.is_file raises
        file = next((path for folder in folders if isfile(path := folder / one[0] / f"{one[1]}.yaml")), None)
        if file is None or one in seen:
            continue
        seen.add(one)
        lines += misread(file, one[0])
        waiting += _defaults(file, one[0])
        named |= _names(file)
    if group == "cluster" and seen and not lines and "executor" not in named:
        lines.append(
            f"cluster={option}: names no executor, so its cells would run on this machine; add executor: slurm"
        )
    return lines


def _names(file: Path) -> set[str]:
    """Return the names at the top of a file of YAML that has no mistakes."""
    try:
        content = load_yaml(file)
    except Exception:  # `misread` has a line for it
        return set()
    return set(map(str, content)) if isinstance(content, dict) else set()


def _defaults(file: Path, group: str) -> list[tuple[str, str]]:
    """Return the options, each with its group, that a file's defaults list names."""
    try:
        listed = load_yaml(file).get("defaults") or []
    except Exception:  # `misread` has a line for it, or Hydra has
        return []
    options = []
    for entry in listed if isinstance(listed, list) else []:
        for name, option in entry.items() if isinstance(entry, dict) else [("", entry)]:
            name = str(name).removeprefix("override ").removeprefix("optional ").partition("@")[0]
            of_group = name.removeprefix("/") if name.startswith("/") else f"{group}/{name}".rstrip("/")
            options += [(of_group, option)] if isinstance(option, str) and option != "_self_" else []
    return options
