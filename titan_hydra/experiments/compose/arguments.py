"""Parse the arguments of launch.py before Hydra does. Flags may stand anywhere, and each mistake gives one line."""

import re
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import did_you_mean
from titan_hydra.core.job.config.files import CONF
from titan_hydra.core.job.config.load import kind_of

from .folders import added
from .meant import meant_by
from .overrides import mistakes, steps_of_a_fake_rank

# flags that exclude each other, because Hydra accepts only one of them
MODES = ("run", "multirun", "cfg", "info", "shell_completion")


def arranged(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the overrides and the flags separately, as Hydra's parser needs all overrides next to each other. Raises
    ConfigError with a line for each mistake.
    """
    from titan_hydra.core.base.private import get_args_parser

    arguments = _gpus_as_key(arguments)
    parser = get_args_parser()
    parser.error = _refuse  # argparse would print its usage first
    args = parser.parse_intermixed_args(arguments)
    flags = list(arguments)
    for override in args.overrides:
        flags.remove(override)
    if wrong := _wrong_flag(args):
        raise ConfigError(wrong)
    elsewhere = args.shell_completion or args.hydra_help or args.config_path
    if not elsewhere and (lines := mistakes(args.overrides, [CONF, *added]) + steps_of_a_fake_rank(args.overrides)):
        raise ConfigError("\n".join(dict.fromkeys(lines)))
    return args.overrides, flags


def _gpus_as_key(arguments: list[str]) -> list[str]:
    """Return the arguments with `--gpus N` or `--gpus=N` as gpus=N, as `titan plan` takes both forms."""
    overrides, remaining = [], list(arguments)
    while remaining:
        word = remaining.pop(0)
        if word == "--gpus" and remaining and re.fullmatch(r"[\w,]+", remaining[0]):
            overrides.append(f"gpus={remaining.pop(0)}")
        else:
            overrides.append(word.removeprefix("--") if word.startswith("--gpus=") else word)
    return overrides


def _refuse(message: str) -> None:
    """Raise ConfigError with the message that argparse gives for arguments that it cannot parse."""
    _, unknown, rejected = message.partition("unrecognized arguments: ")
    first = rejected.split(" ")[0]
    name, _, value = first.lstrip("-").partition("=")
    name = name.replace("-", "_")
    meant = [f"{name}={value or 'VALUE'}"] if kind_of(name) is not None else meant_by(name, value, value)
    if unknown and meant:
        message = f"{first}: keys are given without dashes{did_you_mean(meant)}"
    raise ConfigError(f"{message} (`python launch.py --help` lists keys and flags)")


def _wrong_flag(args: Any) -> str | None:
    """Return what is wrong with the flags of a command line; None if nothing is."""
    modes = [f"--{mode.replace('_', '-')}" for mode in MODES if getattr(args, mode)]
    if len(modes) > 1:
        return f"{' and '.join(modes)}: only one of them at a time"
    if args.resolve and not args.cfg:
        return "--resolve: goes with --cfg job"
    if args.experimental_rerun:
        return "--experimental-rerun: is not supported; the same command line resumes a run"
    if args.shell_completion and not any(
        text.startswith(("install=", "uninstall=", "query=")) for text in args.overrides
    ):
        return "--shell-completion: takes install=SHELL or uninstall=SHELL (bash, fish or zsh)"
    if args.package and not args.package.startswith(("_global_", "hydra")) and kind_of(args.package) is None:
        return f"--package {args.package}: no such key or group"
    return None
