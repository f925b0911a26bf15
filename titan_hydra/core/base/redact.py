"""Recognize secrets (WANDB_API_KEY, HF_TOKEN, passwords) by name, by value and by form, so that no file of a run holds
a secret.
"""

import os
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any

# Parts of a variable's name, between underscores, which show that the variable holds a secret.
SURE = {"SECRET", "PASSWD", "PASSPHRASE", "SSHPASS", "CREDENTIAL", "CREDENTIALS", "JWT", "AUTHORIZATION"}
LAST = {"PASS", "PWD"}  # parts that show a secret only if they end a name that has several parts
PERHAPS = {"KEY", "APIKEY", "TOKEN", "PAT"}  # parts that may show a secret, but may have another meaning in code
SHORTEST = 8  # minimum length of a secret's value, as a shorter one would match ordinary text
SHAPES = re.compile(  # tokens with known prefixes, passwords in addresses, authorization headers, private keys
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[A-Za-z0-9_-]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bglpat-[\w-]{16,}"
    r"|\bA[KS]IA[0-9A-Z]{16}\b|\bxox[abprs]-[\w-]{10,}|\bwandb_v1_\w{20,}|\beyJ[\w-]{8,}\.[\w-]{4,}\.[\w-]*"
    r"|(?<=://)[^\s/:@'\"${<]*:(?![${<])[^\s/@'\"]+(?=@)|\b[0-9a-f]{32,}(?=@)|(?i:authorization[\"']?\s*[:=]\s*[\"']?(?:basic|bearer|token)\s+)[^\s\"'{]+"
    r"|(?i:\bbearer)\s+(?=[^\s\"']*\d)[\w.~+/=-]{8,}|-----BEGIN [A-Z ]*PRIVATE KEY-----(.*?-----END [A-Z ]*PRIVATE KEY-----)?",
    re.S,
)
ASSIGNED = re.compile(  # NAME = "value", NAME: value, NAME=value, x["NAME"] = "value"
    r"""(?P<name>\b\w+)(?P<is>["']?\]?\s*[:=]\s*)(?:(?P<quote>["'])(?P<quoted>[^"'\n]{6,})(?P=quote)|(?P<bare>[\w+/=.~-]{6,})(?=\s|$|[,;)}\]]))"""
)
# In code: a name to which something is assigned, or which is compared or passed.
NAMED = re.compile(r"""(?P<name>\b[A-Za-z_]\w*)(?P<is>["']?\]?\s*[:=!]=?\s*|["']\s*,\s*(?=["']))""")
LITERAL = re.compile(r"""(?P<quote>["'])(?P<value>(?:\\.|(?!(?P=quote)).)+)(?P=quote)""")


@lru_cache(4096)  # cached, as it is called with all names of the environment for each value of a configuration
def sureness(name: str) -> int:
    """Return whether a variable of this name holds a secret: 0 no (TOKENIZERS_PARALLELISM), 1 perhaps, 2 surely
    (HF_TOKEN).
    """
    whole = (re.sub("(?<=[a-z])(?=[A-Z])", "_", name) if name[:1].islower() else name).upper()
    parts = whole.split("_")
    sure = SURE & set(parts) or (len(parts) > 1 and parts[-1] in LAST) or re.search("PASSWORD|AUTH_CONFIG", whole)
    return 2 if sure else int(bool(PERHAPS & set(parts)) or parts[-1].endswith(("TOKEN", "APIKEY")))


def redact(text: str, environment: Mapping[str, str] = os.environ, code: bool = False) -> str:
    """Remove secrets from a text: values of secret environment variables, known formats, and literals that are assigned
    to a secret's name. In the form of the shell, NAME=value, any value counts as a literal. With `code`, which is for
    diffs, all literals are removed from lines that assign to such a name.
    """
    secrets = {value: name for name, value in environment.items() if sureness(name) and len(value) >= SHORTEST}
    for value in sorted(secrets, key=len, reverse=True):
        text = text.replace(value, f"[redacted {secrets[value]}]")
    text = SHAPES.sub("[redacted]", text)
    return "\n".join(_without_values(text.split("\n"))) if code else ASSIGNED.sub(_assigned, text)


def _assigned(match: re.Match[str]) -> str:
    """Return the assignment that `match` found, with its value replaced if the name is that of a secret and the value
    is one: neither too short, nor a variable, nor the path of a file.
    """
    name, value, sure = match["name"], match["quoted"] or match["bare"], sureness(match["name"])
    shell = match["is"] == "=" and name.isupper()
    # whether the value is the path of a file that holds the secret
    a_file = shell and value.startswith(("/", "~", "./"))
    if not sure or (sure < 2 and len(value) < SHORTEST) or a_file or re.search(r"[$`]", value):
        return match[0]
    literal = (sure == 2 or not re.search(r"\s", value)) if match["quoted"] else shell or _mixed(value)
    return f"{name}{match['is']}{match['quote'] or ''}[redacted]{match['quote'] or ''}" if literal else match[0]


def _mixed(value: str) -> bool:
    """Whether an unquoted word looks like a literal rather than a name."""
    return any(char.isdigit() for char in value) and any(char.isalpha() for char in value) and "." not in value


def _without_values(lines: list[str]) -> Iterator[str]:
    """Yield lines of code without their literals, if they assign to a secret's name or continue such a line."""
    sure, block = 0, False  # how surely the next line continues a secret; whether it continues a text of several lines
    for line in lines:
        if block:
            yield f"{line[:1]}[redacted]"
            sure, block = 0, False
            continue
        named = [match for match in NAMED.finditer(line) if sureness(match["name"])]
        begin = named[0].end() if named else 0 if sure else len(line)
        sure = max([sure, *(sureness(match["name"]) for match in named)])
        rest = LITERAL.sub(partial(_without_literal, sure=sure), line[begin:])
        if named and (bare := re.match(r"[\w+/=~-]+(?=\s|$|[,;)}\]])", rest)):
            shell = named[0]["is"] == "=" and named[0]["name"].isupper()
            if shell or (_mixed(bare[0]) and (sure == 2 or len(bare[0]) >= SHORTEST)):
                rest = "[redacted]" + rest[bare.end() :]
        text = any(line.count(quotes) % 2 for quotes in ('"""', "'''")) or rest.endswith("\\")
        block = bool(named) and (text or rest.strip() in ("|", "|-", ">", ">-"))
        yield line[:begin] + ("[redacted]" if named and text else rest)
        sure = sure if named and rest.rstrip().endswith(("(", "[", "{")) else 0


def _without_literal(match: re.Match[str], sure: int) -> str:
    value = match["value"]
    harmless = sure < 2 and (len(value) < SHORTEST or re.search(r"\s", value))
    a_name = value.isupper() and sureness(value)  # whether the value is the name of a variable that holds the secret
    return match[0] if harmless or a_name or "[redacted" in value else f"{match['quote']}[redacted]{match['quote']}"


def secrets_in(content: Any, environment: Mapping[str, str] = os.environ, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each secret in a configuration and the reason why it is one, never the value."""
    if isinstance(content, Mapping):
        for name, value in content.items():
            inner = f"{key}.{name}" if key else str(name)
            if key == "cluster.environment" and sureness(str(name)):
                yield inner, f"{name} is a secret by its name"
            else:
                yield from secrets_in(value, environment, inner)
    elif isinstance(content, list):
        for value in content:
            yield from secrets_in(value, environment, key)
    elif isinstance(content, str) and redact(content, environment) != content:
        yield key, "holds a secret"
