"""Secrets (WANDB_API_KEY, HF_TOKEN, passwords) stay in the environment: they are recognized here, by name, by value and by shape."""
from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

WORDS = {"KEY", "APIKEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL", "CREDENTIALS", "PAT"}  # parts of a name
SHORTEST = 8  # a shorter value is in every other text
SHAPES = re.compile(  # what the issuers make recognizable, and private keys
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{16,}|\bAKIA[0-9A-Z]{16}\b"
    r"|\bxox[abprs]-[\w-]{10,}|\bwandb_v1_\w{20,}|-----BEGIN [A-Z ]*PRIVATE KEY-----(.*?-----END [A-Z ]*PRIVATE KEY-----)?", re.S)
ASSIGNED = re.compile(  # NAME = "value", NAME: value, NAME=value, of a name that says what it is
    r"""(?P<name>\b\w+)(?P<is>["']?\s*[:=]\s*)(?P<quote>["']?)(?P<value>[\w+/=.~-]{8,})(?P=quote)(?=\s|$|[,;)}\]])""")


def is_secret_name(name: str) -> bool:
    """Whether a variable of this name holds a secret: HF_TOKEN does, TOKENIZERS_PARALLELISM does not."""
    return bool(WORDS & set(name.upper().split("_")))


def known(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The secrets in the environment: name by value."""
    return {value: name for name, value in environment.items() if is_secret_name(name) and len(value) >= SHORTEST}


def redact(text: str, environment: Mapping[str, str] = os.environ, code: bool = False) -> str:
    """A text without secrets: those of the environment, what looks like one, and literals assigned to a name that says so.

    In the shell's form, NAME=value, any value is a literal; in `code` one without quotes is mostly another variable.
    """
    for value, name in sorted(known(environment).items(), key=lambda pair: -len(pair[0])):
        text = text.replace(value, f"[redacted {name}]")
    return ASSIGNED.sub(_without_literal if code else _assigned_by_a_shell, SHAPES.sub("[redacted]", text))


def _without_literal(match: re.Match) -> str:
    value = match["value"]
    literal = match["quote"] or (any(c.isdigit() for c in value) and any(c.isalpha() for c in value) and "." not in value)
    return _without_value(match) if literal else match[0]


def _assigned_by_a_shell(match: re.Match) -> str:
    a_file = match["value"].startswith(("/", "~", "./"))  # with the secret in it
    return _without_value(match) if match["is"] == "=" and match["name"].isupper() and not a_file else _without_literal(match)


def _without_value(match: re.Match) -> str:
    return f"{match['name']}{match['is']}{match['quote']}[redacted]{match['quote']}" if is_secret_name(match["name"]) else match[0]


def found(content: Any, environment: Mapping[str, str] = os.environ, key: str = "") -> Iterator[tuple[str, str]]:
    """Where in a (nested) configuration secrets stand: the dotted key and what it is, never the value."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            inner = f"{key}.{name}" if key else str(name)
            if key == "cluster.environment" and is_secret_name(str(name)):
                yield inner, f"{name} is a secret by its name"
            else:
                yield from found(value, environment, inner)
    elif isinstance(content, list):
        for value in content:
            yield from found(value, environment, key)
    elif isinstance(content, str) and redact(content, environment) != content:
        yield key, "holds a secret"
