"""`titan --completion SHELL`: print the script that lets a shell complete titan's commands, options, sweeps, cells and
hashes.

At each Tab the script calls `titan --completion-words ...`, so it also completes runs and options newer than itself.
"""

import argparse
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.base.private import options_of
from titan_hydra.core.job.config.additions import Word, verbs_of, words_alone
from titan_hydra.experiments.runs import find
from titan_hydra.experiments.runs.view import short_names

SCRIPTS = {
    "bash": """_titan() { mapfile -t COMPREPLY < <(titan --completion-words="${COMP_WORDS[*]:1:COMP_CWORD}" 2>/dev/null); }
complete -o default -F _titan titan""",
    "zsh": """_titan() {
    local -a found=(${(f)"$(titan --completion-words="${(j: :)words[2,CURRENT]}" 2>/dev/null)"})
    (( $#found )) && compadd -a found || _files
}
compdef _titan titan""",
    "fish": """function _titan
    titan --completion-words=(string join -- " " (commandline -opc)[2..] (commandline -ct)) 2>/dev/null
end
complete -c titan -a '(_titan)'""",
}
RUNS = ("target", "cell", "A", "B")  # names (argparse's dest) of the arguments whose values are runs


def answer_shell(argv: list[str], commands: dict[str, Word]) -> int:
    """Print a shell's script or, with --completion-words, the candidates for the last word."""
    parser = argparse.ArgumentParser(prog="titan", allow_abbrev=False)
    parser.add_argument(
        "--completion", choices=SCRIPTS, help='the shell; it reads the script by: eval "$(titan --completion bash)"'
    )
    parser.add_argument("--completion-words", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.completion:
        print(SCRIPTS[args.completion])
        return Exit.DONE
    words = args.completion_words.split(" ")
    print(*(word for word in candidates(words, commands) if word.startswith(words[-1])), sep="\n")
    return Exit.DONE


def candidates(words: list[str], commands: dict[str, Word]) -> Iterable[str]:
    """List the candidates for the last word. The list is empty if the shell should complete file names."""
    if len(words) == 1:
        return words_alone(commands)
    verbs = verbs_of(words[0], commands)
    if len(words) == 2 and verbs and not (words[0] in commands and commands[words[0]].place):
        return verbs
    command, before = (f"{words[0]} {words[1]}", words[2:-1]) if words[1] in verbs else (words[0], words[1:-1])
    # `titan run` has the arguments of launch.py, which are Hydra's
    if command not in commands or not commands[command].place or command == "run":
        return []
    return [*(verbs if len(words) == 2 else ()), *_of_command(commands[command], before, words[-1])]


def _of_command(command: Word, before: list[str], typed: str) -> Iterable[str]:
    """List the candidates for a word of the arguments of one command, behind the arguments `before`."""
    parser = argparse.ArgumentParser()
    command.functions()[0](parser)
    options = {name: action for action in options_of(parser) for name in action.option_strings}
    runs = Path(dict(pairwise(before)).get("--runs", "runs"))
    last = options.get(before[-1]) if before else None
    if last is not None and last.nargs != 0:  # the word before is an option, so the last word is its value
        return _names(runs) if last.metavar == "RUN" else last.choices or []
    if typed.startswith("-"):
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
