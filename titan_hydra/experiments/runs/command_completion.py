"""`titan completion SHELL`: print the script that lets a shell complete titan's commands, options, sweeps, cells and
hashes.

At each Tab the script calls `titan completion --words ...`, so it also completes runs and options newer than itself.
"""

import argparse
import importlib
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.private import options_of
from titan_hydra.core.job.config.additions import Word
from titan_hydra.experiments.runs import find
from titan_hydra.experiments.runs.view import short_names

SCRIPTS = {
    "bash": """_titan() { mapfile -t COMPREPLY < <(titan completion --words="${COMP_WORDS[*]:1:COMP_CWORD}" 2>/dev/null); }
complete -o default -F _titan titan""",
    "zsh": """_titan() {
    local -a found=(${(f)"$(titan completion --words="${(j: :)words[2,CURRENT]}" 2>/dev/null)"})
    (( $#found )) && compadd -a found || _files
}
compdef _titan titan""",
    "fish": """function _titan
    titan completion --words=(string join -- " " (commandline -opc)[2..] (commandline -ct)) 2>/dev/null
end
complete -c titan -a '(_titan)'""",
}
RUNS = ("target", "cell", "A", "B")  # names (argparse's dest) of the arguments whose values are runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", nargs="?", choices=SCRIPTS, help='the shell; it reads the script by: eval "$(titan completion bash)"'
    )
    parser.add_argument("--words", help=argparse.SUPPRESS)


def main(args: argparse.Namespace) -> int:
    """Print a shell's script or, with --words, the candidates for the last word."""
    if args.words is not None:
        words = args.words.split(" ")
        print(*(word for word in candidates(words, args.commands) if word.startswith(words[-1])), sep="\n")
    elif args.shell:
        print(SCRIPTS[args.shell])
    else:
        raise ConfigError(f"which shell? {', '.join(SCRIPTS)}")
    return Exit.DONE


def candidates(words: list[str], commands: dict[str, Word]) -> Iterable[str]:
    """List the candidates for the last word. The list is empty if the shell should complete file names."""
    command, before = words[0], words[1:-1]
    if len(words) == 1:
        return commands
    if command not in commands or command == "run":  # `titan run` has the arguments of launch.py, which are Hydra's
        return []
    parser = argparse.ArgumentParser()
    importlib.import_module(commands[command].module).add_arguments(parser)
    options = {name: action for action in options_of(parser) for name in action.option_strings}
    runs = Path(dict(pairwise(before)).get("--runs", "runs"))
    last = options.get(before[-1]) if before else None
    if last is not None and last.nargs != 0:  # the word before is an option, so the last word is its value
        return _names(runs) if last.metavar == "RUN" else last.choices or []
    if words[-1].startswith("-"):
        return options
    for action in options_of(parser):
        if not action.option_strings and action.choices:
            return action.choices
        if action.dest in RUNS:
            return _names(runs)
    return []


def _names(runs: Path) -> list[str]:
    """List the names of sweeps, of the cells of the newest sweep, and of all runs, and the runs' hashes."""
    sweeps = find.readable(runs)
    cells = short_names(find.sweep(sweeps[0]).cells) if sweeps else []
    directories = [run.name for run in find.all_runs(runs)]
    return [
        *(folder.name for folder in sweeps),
        *cells,
        *(name.rpartition("-")[2] for name in directories),
        *directories,
    ]
