"""Describe the configuration: docs/configuration.md and the text of `python launch.py --help`, made from the schema and
conf/.

    python -m titan_hydra.experiments.compose.describe                          # print the page
    python -m titan_hydra.experiments.compose.describe docs/configuration.md    # write it
"""

import argparse
import dataclasses
import re
import textwrap
import typing
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from titan_hydra.core.job.config.fault import as_typed
from titan_hydra.core.job.config.files import ASSETS, CONF, default_options, load_yaml
from titan_hydra.core.job.config.load import changes_of, kind_of, known_keys, owners
from titan_hydra.core.job.config.schema import default_of

PAGE_WIDTH, HELP_WIDTH = 140, 80
KEYS = known_keys()
GROUPS_OF_RECIPES = {  # groups without keys of their own, whose options set keys of other groups
    "experiment": "whole recipes: each sets keys of many groups",
    "sweeps": "named sweeps, chosen with a plus (+sweeps=NAME): a list of cells and what they share",
}
BLOCKS = {  # the groups of the first screen of --help, by what they decide
    "experiment": "model data tokenizer objective loss optimizer lr_scheduler parametrization adapter precision train "
    "experiment sweeps sweep",
    "layout": "parallelism pp_schedule ac compile comm hardware",
    "run": "checkpoint validation metrics profiling debug fault_tolerance search",
    "place": "cluster launch paths",
}


def main() -> None:
    """Print the page, or write it to the file that was given."""
    parser = argparse.ArgumentParser(
        prog="python -m titan_hydra.experiments.compose.describe", description="Every option and key, as a page."
    )
    parser.add_argument(
        "file", nargs="?", type=Path, help="write it here (docs/configuration.md) instead of printing it"
    )
    file = parser.parse_args().file
    if file:
        file.write_text(configuration_page(), encoding="utf-8")
    else:
        print(configuration_page(), end="")


def configuration_page() -> str:
    """Return the text of docs/configuration.md."""
    index = [
        "- [Keys without a group](#keys-without-a-group)",
        *(f"- [{group}](#{group}): {meaning(group)}" for group in groups()),
    ]
    introduction = (ASSETS / "configuration.md").read_text(encoding="utf-8")
    parts = [introduction, *index, "", "## Keys without a group\n", *map(_key_item, plain_keys()), ""]
    for group in groups():
        parts += [f"## {group}\n", _sentence(meaning(group)) + "\n"]
        parts += _group_items(group)
    return "\n".join(parts).rstrip() + "\n"


def _group_items(group: str) -> list[str]:
    parts = [*(_option_item(group, file) for file in option_files(group)), ""] if option_files(group) else []
    return parts + (["Keys:\n", *map(_key_item, keys_of(group)), ""] if keys_of(group) else [])


def help_text(words: Sequence[str] = ()) -> str:
    """Return the first screen of the help: examples, and the groups with what a plain line composes. With `words` (groups
    or keys), return their entries of the page.
    """
    if words:
        from .overrides import unknown_key

        known = {group: "\n".join(_group_items(group)) for group in groups()}
        return "\n".join(
            known.get(word) or (_key_item(word) if word in KEYS else unknown_key(word)) for word in words
        ).rstrip()
    chosen, others = plain_options(), {group for names in BLOCKS.values() for group in names.split()}
    lines = []
    for block, names in (BLOCKS | {"": " ".join(group for group in groups() if group not in others)}).items():
        shown = " ".join(f"{name}={chosen[name]}" if chosen.get(name) else name for name in names.split())
        lines += [_wrap(shown, HELP_WIDTH, f"  {block:<12}", " " * 14)] * bool(names)
    lines.append(_wrap(" ".join(plain_keys()), HELP_WIDTH, f"  {'no group':<12}", " " * 14))
    return (ASSETS / "help.txt").read_text(encoding="utf-8").rstrip().format(groups="\n".join(lines))


def plain_options() -> dict[str, str]:
    """Return the option of each group that a line without overrides composes: the default of conf/config.yaml or, where
    the default of another group overrides it, that one.
    """
    chosen = default_options()
    return chosen | {name: option for name, option in _plain_settings().items() if name in chosen}


@cache
def _plain_settings() -> dict[str, Any]:
    """Return the keys and groups that the options of conf/config.yaml set outside their own group."""
    files = ((group, CONF / group / f"{option}.yaml") for group, option in default_options().items())
    settings = {key: value for group, file in files if file.is_file() for key, value in _settings(group, file).items()}
    return {key: value for key, value in settings.items() if "." not in key}


def groups() -> list[str]:
    """List the groups: the sections of the schema in its order (with or without a folder in conf/), then recipes and
    sweeps.
    """
    return [key for key, spec in KEYS.items() if "." not in key and _is_group(spec)] + [*GROUPS_OF_RECIPES]


def meaning(group: str) -> str:
    """Return a phrase for what a group configures."""
    return GROUPS_OF_RECIPES.get(group) or KEYS[group].metadata["help"]


def keys_of(group: str) -> dict[str, dataclasses.Field[Any]]:
    """Return the keys of a group that take a value."""
    return {key: spec for key, spec in KEYS.items() if key.startswith(f"{group}.") and not _is_group(spec)}


def plain_keys() -> dict[str, dataclasses.Field[Any]]:
    """Return the keys outside every group."""
    return {key: spec for key, spec in KEYS.items() if "." not in key and not _is_group(spec)}


def option_files(group: str) -> list[Path]:
    """Return the option files of a group, the default first."""
    files = sorted((CONF / group).glob("*.yaml"))
    return sorted(files, key=lambda file: file.stem != plain_options().get(group))


def when(file: Path) -> str:
    """Return the comment line of an option file, which states when to choose it, without Hydra's `# @package` line. ""
    if there is none.
    """
    comments = [
        line
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("#") and "@package" not in line
    ]
    return comments[0].lstrip("# ") if comments else ""


def _settings(group: str, file: Path) -> dict[str, Any]:
    """Return the keys that an option sets, by their full names, without `name`."""
    package = "" if "# @package _global_" in file.read_text(encoding="utf-8") else f"{group}."
    flat = dict(_flatten(load_yaml(file), package))
    return {key: value for key, value in flat.items() if key != f"{group}.name"}


def _key_item(key: str) -> str:
    """Return the list entry of a key for the reference page: its values, its default, what it changes, and its help."""
    spec = KEYS[key]
    notes = [f"changes {changes_of(key)[1]}"] if spec.metadata["identity"] else ["*not in the hash*"]
    if parts := owners(key):
        notes.append(f"of {', '.join(parts)}")
    if spec.metadata["only"]:
        group = key.rpartition(".")[0]
        notes.append(f"read by {', '.join(f'`{group}={option}`' for option in spec.metadata['only'])}")
    head = f"- `{key}`: {_values_of(key)}; {_shown_default(key)}{''.join(f'; {note}' for note in notes)}."
    return _wrap(f"{head} {_sentence(spec.metadata['help'])}", PAGE_WIDTH, "", "  ")


def _values_of(key: str) -> str:
    """Describe the values of a key: type, range and choices."""
    spec, kind = KEYS[key], _type_of(key)
    if spec.metadata["choices"]:
        return f"{kind}, one of {', '.join(spec.metadata['choices'])}"
    return f"{kind}, {spec.metadata['range']}" if str(spec.metadata["range"] or "") else kind


def _option_item(group: str, file: Path) -> str:
    """Return the list entry of an option for the reference page: when to choose it, and what it sets."""
    if group == "sweeps":
        cells = "; ".join(load_yaml(file)["sweep"]["cells"])
        return _wrap(f"- **+sweeps={file.stem}**: {when(file)} Cells: {cells}.", PAGE_WIDTH, "", "  ")
    default = ""
    if file.stem == plain_options().get(group):
        default = " (default)"
    elif file.stem == default_options().get(group):  # what the default model or data overrides
        default = " (default of other models and data)"
    text = f"- **{group}={file.stem}**{default}: {when(file)}"
    values = " ".join(
        f"{key.removeprefix(f'{group}.')}={as_typed(value)}" for key, value in _settings(group, file).items()
    )
    return _wrap(f"{text} Sets `{values}`." if values else text, PAGE_WIDTH, "", "  ")


def _shown_default(key: str) -> str:
    """Return a key's default, which conf/config.yaml may set for keys without a group."""
    if "." not in key:
        default = load_yaml(CONF / "config.yaml").get(key, default_of(KEYS[key]))
        plain = _plain_settings().get(key, default)
        other = f" on a plain line, else `{as_typed(default)}`" * (plain != default)
        return f"`{as_typed(plain)}`{other}" if plain != "" else "empty"
    group = key.partition(".")[0]
    option, default = plain_options().get(group), default_of(KEYS[key])
    given = _settings(group, option_files(group)[0]).get(key, default) if option else default
    if given == "???":
        return "given by the option"
    return f"`{as_typed(given)}`" + (
        f" by {group}={option}, else `{as_typed(default)}`" * (given != default and default != "???")
    )


def _type_of(key: str) -> str:
    kind = kind_of(key)
    name = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    return name.replace("None", "null").replace("typing.", "").replace("titan_hydra.core.job.config.schema.", "")


def _is_group(spec: dataclasses.Field[Any]) -> bool:
    return dataclasses.is_dataclass(spec.default_factory)


def _flatten(node: dict[str, Any], prefix: str) -> typing.Iterator[tuple[str, Any]]:
    """Yield (key, value) of all values of a YAML file, and (group, option) of its defaults list."""
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{key}.")
        elif key == "defaults":
            for override in value:
                yield from ((group.removeprefix("override /"), option) for group, option in override.items())
        else:
            yield prefix + key, value


def _sentence(text: str) -> str:
    """Capitalize a text and end it with a full stop. A text that begins with a name (`linear_cross_entropy: ...`) keeps
    its first letter.
    """
    start = text if re.match(r"\w*_|[\w=]+(, \w+)*:", text) else text[0].upper() + text[1:]
    return start + "." * (text[-1] not in ".?!")


def _wrap(text: str, width: int, first: str, rest: str) -> str:
    return textwrap.fill(
        text, width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    main()
