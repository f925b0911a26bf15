"""Explain exceptions of Hydra and OmegaConf in one line each."""

import re
import traceback
from collections.abc import Callable

from titan_hydra.core.job.config.fault import shown

from .overrides import unknown_key
from .scan import mistake_of_yaml

# packages whose exceptions concern the command line or conf/
THEIRS = ("hydra", "omegaconf", "antlr4", "yaml")
OURS = ("titan_hydra", "__main__")


def explain(error: BaseException) -> str | None:
    """Return one line about the command line for an exception of Hydra, OmegaConf or YAML; None if another program
    raised it.
    """
    if not _theirs(error):
        return None
    chain = [error]
    while (chain[-1].__cause__ or chain[-1].__context__) and len(chain) < 8:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    import yaml

    for link in chain:
        if isinstance(link, yaml.MarkedYAMLError) and link.problem_mark:
            return shown(f"{link.problem_mark.name}:{mistake_of_yaml(link)}", 1000)
    text = "\n".join(str(link) for link in chain)
    for pattern, line in PATTERNS:
        if match := re.search(pattern, text, re.S):
            return shown(line(*match.groups()), 1000)
    lines = str(error).strip().splitlines()
    return shown(lines[0] if lines else type(error).__name__, 1000)


def _theirs(error: BaseException) -> bool:
    """Whether the exception was raised by Hydra, OmegaConf, antlr4 or yaml rather than by this package.

    The innermost frame that is in one of these packages or in this package decides; other frames are skipped.
    """
    packages = [
        frame.f_globals.get("__name__", "").partition(".")[0] for frame, _ in traceback.walk_tb(error.__traceback__)
    ]
    return next((package in THEIRS for package in reversed(packages) if package in THEIRS + OURS), False)


PATTERNS: list[tuple[str, Callable[..., str]]] = [
    (
        r"Ambiguous value for argument '([^\n]+)'\n",
        lambda override: f"{override}: several values need -m, or brackets where they are a list",
    ),
    (r"Sweep parameters '([^\n]+)' requires --multirun", lambda override: f"{override}: several values need -m"),
    (
        r"In '([^']+)': \w+ raised while composing config:\n([^\n]+)(?:\n\s+full_key: ([^\n]+))?",
        lambda file, reason, key: f"{file}.yaml: {f'{key}: ' if key else ''}{reason}",
    ),
    (r"Could not override '([^']+)'", unknown_key),
    (r"Error merging override ([^\n]+)\n([^\n]+)", lambda override, reason: f"{override}: {reason}"),
    (
        r"Interpolation key '([^']+)' not found",
        lambda key: f"${{{key}}}: an interpolation names a key that does not exist",
    ),
    (r"Could not find '([^'\n]*)'", lambda file: f"{file}: no such option or file"),
]
