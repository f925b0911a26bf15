"""Make command lines from the schema, and list those that crashed version 0.1: some must be refused, others may be
accepted, but none may crash.

`lines()` yields the same pairs (overrides, refused) every time. `refused` is whether the line must be refused; None
means that it may be refused or accepted.
"""

import random
import typing
from pathlib import Path

from titan_hydra.core.job.config.files import default_options
from titan_hydra.core.job.config.load import kind_of, known_keys
from titan_hydra.core.job.config.ranges import Interval, range_of
from titan_hydra.core.job.config.schema import default_of
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.compose.describe import option_files
from titan_hydra.experiments.compose.meant import SYNONYMS

REPORT = Path(__file__).with_name("report_lines.txt")  # one line each; `!` marks those that must be refused
LEAVES = {
    key: spec
    for key, spec in known_keys().items()
    if not isinstance(kind_of(key), type) or kind_of(key).__module__ == "builtins"
}
GROUPS = default_options()
DEFAULT = compose_job()
WRONG_TYPES = {
    int: ["abc", "1.5", "nan", "[1]", "{a: 1}", "''", "true", "9" * 30, "1e3", "[[1]]"],
    float: ["abc", "nan", "inf", "-inf", "[1]", "true", "''", "{a: 1}", "[nan]", "-nan"],
    bool: ["2", "maybe", "1.5", "[true]", "-1", "''", "nan"],
    str: ["[a]", "{a: b}", "'a\tb'", "'a\nb'", "'\x1b[2J'", "[[]]", "'\u2028'"],
    list: ["abc", "[[1]]", "[a,[b]]", "{a: 1}", "3", "[{a: 1}]", "['\n']"],
    dict: ["abc", "[a]", "3", "null"],
}


def lines(seed: int = 0, wrong_types: int = 4, mixtures: int = 200):
    """Yield all command lines of the corpus, in a fixed order; each key is tried with `wrong_types` values of another
    type.
    """
    draw = random.Random(seed)
    yield from from_report()
    for key in LEAVES:
        yield from of_key(key, draw, wrong_types)
    for group in GROUPS:
        yield from of_group(group)
    for words in SYNONYMS.values():
        yield from (
            ([f"{word}={value}"], True) for word in words.split() if word not in GROUPS for value in ("8", "1e-3")
        )
    yield from (mixed(draw) for _ in range(mixtures))


def from_report():
    """Return the lines of the trial of version 0.1 (its section 4) that fit on a command line; placeholders are
    replaced by long texts.
    """
    stand_ins = {
        "<newline>": "\n",
        "<300>": "n" * 300,
        "<5000>": "/a" * 2500,
        "<digits>": "9" * 5000,
        "<brackets>": "[" * 3000 + "]" * 3000,
        "<long>": "x" * 100_000,
    }
    for line in REPORT.read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        text = line.lstrip("!")
        for name, value in stand_ins.items():
            text = text.replace(name, value)
        yield text.split(" | "), True if line.startswith("!") else None


def plain_type(key: str) -> type:
    """Return int, float, bool, str, list or dict, whether or not null is legal too."""
    kind = kind_of(key)
    plain = (
        next(part for part in typing.get_args(kind) if part is not type(None))
        if type(None) in typing.get_args(kind)
        else kind
    )
    return typing.get_origin(plain) or plain


def of_key(key: str, draw: random.Random, wrong_types: int):
    """Yield wrong and right values for one key, from its type, range, choices and place."""
    spec, plain = LEAVES[key], plain_type(key)
    wrong = WRONG_TYPES.get(plain, [])
    wrong = draw.sample(wrong, min(wrong_types, len(wrong)))
    if type(None) not in typing.get_args(kind_of(key)) and plain is not dict:
        wrong.append("null")
    if spec.metadata["choices"] and plain is str:
        wrong += ["nosuch", "''"]
    bounds = range_of(spec)
    if isinstance(bounds, Interval):
        wrong += outside(bounds, plain)
    elif plain is str and bounds and bounds.objection(""):
        wrong += ["''", "'" + "x" * 12_000 + "'"]
    prefix = "+" * (plain is dict)
    yield from (([f"{prefix}{key}={value}"], True) for value in wrong)
    yield [f"~{key}"], True
    yield [f"{misspelt(key, draw)}=1"], True
    yield [f"{key}.x=1"], plain is not dict or None
    yield from (([f"{key}={value}"], None) for value in inside(spec, plain, draw))
    if (
        spec.metadata["only"]
        and plain in (int, float)
        and getattr(DEFAULT, key.partition(".")[0]).name not in spec.metadata["only"]
    ):
        yield [f"{key}={default_of(spec) / 2 + 0.3 if plain is float else default_of(spec) + 1}"], True


def outside(bounds: Interval, plain: type) -> list[str]:
    """Return numbers outside an interval."""
    found = [bounds.low - 1] + [bounds.low] * bounds.open_low
    if bounds.high < float("inf"):
        found += [bounds.high + 1, bounds.high * 1000] + [bounds.high] * bounds.open_high
    return [str(plain(number)) for number in found if number not in bounds]


def inside(spec, plain: type, draw: random.Random) -> list[str]:
    """Return values that are legal for the key by itself."""
    bounds = range_of(spec)
    if spec.metadata["choices"]:
        return (
            [draw.choice(spec.metadata["choices"])]
            if plain is str
            else ["[]", f"[{draw.choice(spec.metadata['choices'])}]"]
        )
    if isinstance(bounds, Interval):
        high = min(bounds.high, 10 ** draw.choice([1, 2, 4, 8]))
        return [
            str(plain(number)) for number in (draw.uniform(bounds.low, high), bounds.high) if plain(number) in bounds
        ]
    return {bool: ["true", "off"], str: [draw.choice(["a", "a.b", "x-1"])], list: ["[]", "[a,b.c]"]}.get(plain, [])


def misspelt(key: str, draw: random.Random) -> str:
    """Return a key with two letters exchanged, or with one letter missing."""
    while True:
        place = draw.randrange(1, len(key))
        word = draw.choice(
            [key[: place - 1] + key[place] + key[place - 1] + key[place + 1 :], key[:place] + key[place + 1 :]]
        )
        if kind_of(word) is None and word not in GROUPS and not word.endswith(".") and ".." not in word:
            return word


def of_group(group: str):
    """Return wrong and right choices of an option."""
    first = option_files(group)[0].stem
    for value in (
        "nosuch",
        "",
        "null",
        "true",
        "3",
        f"[{first}]",
        f"{{name: {first}}}",
        f"../{group}/{first}",
        f"/{first}",
        "*",
        "'a\nb'",
        first.upper() + "x",
        "<" * 3,
        "a/b/c",
        "x" * 5000,
    ):
        yield [f"{group}={value}"], True
    yield from (([f"{sign}{group}={first}"], True) for sign in ("+", "++"))
    yield [f"~{group}"], GROUPS[group] is not None or None
    yield [f"{group}.name=zzz"], True
    yield from (([f"{group}={file.stem}"], None) for file in option_files(group))


def mixed(draw: random.Random) -> tuple[list[str], None]:
    """Return lines of several overrides, each of which is legal by itself; together they may be illegal."""
    overrides = []
    for _ in range(draw.randint(2, 5)):
        if draw.random() < 0.4:
            group = draw.choice([name for name in GROUPS if GROUPS[name]])
            overrides.append(f"{group}={draw.choice(option_files(group)).stem}")
        else:
            key = draw.choice(list(LEAVES))
            overrides += [f"{key}={value}" for value in inside(LEAVES[key], plain_type(key), draw)[:1]]
    return overrides or ["steps=3"], None
