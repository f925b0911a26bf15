"""The `titan` command. Each subcommand is a module with `add_arguments(parser)` and `main(args) -> exit status`."""

import argparse
import importlib
import shutil
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from titan_hydra.core.base.errors import Exit, RunError, denied, require_folder
from titan_hydra.core.base.text import all_printed, not_printed, ready_to_print, unprintable
from titan_hydra.core.job.config.additions import Word, of_all
from titan_hydra.core.job.config.fault import did_you_mean, shown, suggest

from . import __version__

GROUPS = ("Before a run", "Runs", "Results", "Instruments")
COMMANDS = {
    "init": Word(
        "titan_hydra.experiments.runs.command_init",
        "write a project of your own: launch.py, options, a model, a sweep, a test",
        ("titan init mylab", "titan init ~/mylab"),
        "Before a run",
    ),
    "cluster": Word(
        "titan_hydra.experiments.launch.command_cluster",
        "init: write conf/cluster/NAME.yaml for your SLURM or Kubernetes; check: what works there, on two nodes",
        ("titan cluster init mysite", "titan cluster check mysite --runs /shared/me/runs"),
        "Before a run",
    ),
    "tokenizer": Word(
        "titan_hydra.experiments.runs.command_tokenizer",
        "train a tokenizer, or encode text files to a .bin",
        (
            "titan tokenizer train --vocab 4096 --out tokenizer.model corpus/*.jsonl",
            "titan tokenizer encode --tokenizer tokenizer.model --out corpus.bin corpus/*.jsonl",
        ),
        "Before a run",
    ),
    "plan": Word(
        "titan_hydra.experiments.plan.command_plan",
        "which layouts fit N GPUs, and how fast they would be; needs no GPU",
        (
            "titan plan model=llama3_8b hardware=h100 gpus=8",
            "titan plan model=llama3_70b hardware=h100 gpus=64,128,256 precision=bf16",
        ),
        "Before a run",
    ),
    "run": Word(
        "titan_hydra.experiments.launch.main",
        "train: one run, or a sweep with -m; the same as python launch.py",
        ("titan run debug=tiny", "titan run -m optimizer.lr=1e-3,2e-3 launch.mode=dry"),
        "Runs",
    ),
    "status": Word(
        "titan_hydra.experiments.runs.command_status",
        "what runs, what failed, what to do next; -f follows; --all: a line for each sweep and run",
        ("titan status -f", "titan status --all"),
        "Runs",
    ),
    "logs": Word(
        "titan_hydra.experiments.runs.command_logs",
        "the log of a rank; -f follows it; --guilty: why the run failed; --hang: which rank is late",
        ("titan logs c992 -f", "titan logs c992 --guilty"),
        "Runs",
    ),
    "cancel": Word(
        "titan_hydra.experiments.runs.command_cancel",
        "stop running and queued runs",
        ("titan cancel c992", "titan cancel --yes"),
        "Runs",
    ),
    "resume": Word(
        "titan_hydra.experiments.launch.command_resume",
        "bring runs further: after a failure or a stop, on other GPUs (gpus=N), for more steps (steps=N)",
        ("titan resume --only node", "titan resume c992 gpus=4", "titan resume c992 steps=400"),
        "Runs",
    ),
    "report": Word(
        "titan_hydra.experiments.report.command_report",
        "the table of a sweep, its plots and its page",
        ("titan report", "titan report --html"),
        "Results",
    ),
    "compare": Word(
        "titan_hydra.experiments.report.command_compare",
        "how two runs differ, and the first step and module at which they diverge",
        ("titan compare c992 e1ee", "titan compare c992 e1ee --json"),
        "Results",
    ),
    "track": Word(
        "titan_hydra.experiments.runs.command_track",
        "copy what runs recorded to wandb or TensorBoard; --send: send wandb's offline files",
        ("titan track c992 --to tensorboard", "titan track --send"),
        "Results",
    ),
    "generate": Word(
        "titan_hydra.experiments.runs.command_generate",
        "let the model of a run or checkpoint continue a text",
        ('titan generate c992 --prompt "The function returns"', 'titan generate c992 --prompt "def " --temperature 0'),
        "Results",
    ),
    "score": Word(
        "titan_hydra.experiments.runs.command_score",
        "the log-probability that the model of a run or export gives each text of a file",
        ("titan score c992 texts.jsonl", "titan score c992 texts.jsonl --out scores.jsonl"),
        "Results",
    ),
    "checkpoint": Word(
        "titan_hydra.experiments.runs.command_checkpoint",
        "list, verify and prune the checkpoints of a run",
        ("titan checkpoint ls c992", "titan checkpoint prune c992 --keep 2"),
        "Results",
    ),
    "convert": Word(
        "titan_hydra.experiments.runs.command_convert",
        "checkpoints to and from Hugging Face safetensors",
        ("titan convert c992 --to hf exported", "titan convert exported --from hf imported"),
        "Results",
    ),
    **of_all("COMMANDS"),
    "completion": Word(
        "titan_hydra.experiments.runs.command_completion",
        "let bash, zsh or fish complete titan's commands and options",
        ('eval "$(titan completion bash)"', "titan completion fish"),
    ),
}
ELSEWHERE = {  # words of other programs, and the line of titan that does it
    "train launch submit start torchrun": "titan run",
    "ls list ps runs show top queue": "titan status --all",
    "watch follow monitor": "titan status -f",
    "tail log debug": "titan logs",
    "kill delete abort": "titan cancel",
    "stop": "titan cancel",
    "restart rerun continue retry": "titan resume",
    "extend longer": "titan resume RUN steps=N",
    "table plot plots page results summary": "titan report",
    "diff": "titan compare",
    "sync wandb tensorboard": "titan track",
    "export import": "titan convert",
    "eval evaluate likelihood loglikelihood": "titan score",
    "complete inference": "titan generate",
    "tune": "titan plan --tune K",
    "estimate fit memory advise": "titan plan",
    "new create": "titan init",
    "test check prove certify": "titan verify",
    "coordcheck": "titan verify widths",
    "tokenize encode": "titan tokenizer encode",
    "config": "titan run --cfg job",
    "help": "titan --help",
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand. A user's mistake is printed as one line on stderr; only bugs print a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    ready_to_print()
    if argv[:1] == ["help"]:
        argv = [*argv[1:2], "--help"]
    for old, new in of_all("RENAMED").items():
        command, word = old.split()
        if argv[:1] == [command] and word in argv[1:]:
            print(f"titan {old}: is `titan {new}` now", file=sys.stderr)
            return Exit.CONFIG
    if not argv or argv[0] in ("-h", "--help"):
        print(listing(_width()))
        return Exit.DONE
    if argv[0] == "--version":
        print(f"titan_hydra {__version__}")
        return Exit.DONE
    if argv[0] not in COMMANDS:
        meant = [line for words, line in ELSEWHERE.items() if argv[0].lower() in words.split()]
        hint = did_you_mean(meant or suggest(argv[0], list(COMMANDS)), otherwise="; `titan` lists them")
        print(f"titan {shown(argv[0])}: no such command{hint}", file=sys.stderr)
        return Exit.CONFIG
    command = importlib.import_module(COMMANDS[argv[0]].module)
    if argv[0] == "run":
        return _run(lambda args: _launched(command, args.words), argparse.Namespace(words=argv[1:]))
    return _run(command.main, _arguments(command, argv))


def listing(width: int) -> str:
    """Return what `titan --help` prints on a terminal of this width: the words in their groups."""
    lines = ["Usage: titan COMMAND [OPTIONS]    (titan COMMAND --help: options and examples)"]
    wide = max(map(len, COMMANDS)) + 4
    for group in GROUPS:
        if words := {name: word for name, word in COMMANDS.items() if word.group == group}:
            lines += ["", group]
        for name, word in words.items():
            first = f"  {name}".ljust(wide)
            lines += textwrap.wrap(
                word.text, width, initial_indent=first, subsequent_indent=" " * wide, break_on_hyphens=False
            )
    return "\n".join(lines)


def _width() -> int:
    """Return the number of columns that a help text takes: those of the terminal, up to a length that is read well."""
    return min(shutil.get_terminal_size().columns, 120)


def _launched(command: ModuleType, words: list[str]) -> int:
    """Run launch.py with these words. A project's options are found as by the launch.py of the current folder."""
    before, sys.argv = sys.argv, ["launch.py", *words]
    try:
        return command.main(Path("launch.py"))
    finally:
        sys.argv = before


def _run(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command. Return its exit status, or that of the error that ended it, of which one line is printed."""
    try:
        require_folder()
        return all_printed(command(args))
    except RunError as error:
        print(error, file=sys.stderr)
        return error.status
    except PermissionError as error:  # for example, the runs belong to another user
        print(denied(error, "--runs", getattr(args, "runs", None) or Path()), file=sys.stderr)
        return Exit.CONFIG
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        sys.stderr.close()
        return Exit.DONE
    except OSError as error:
        if not unprintable(error):
            raise
        return not_printed(error)


def _arguments(command: ModuleType, argv: list[str]) -> argparse.Namespace:
    """Parse the arguments of a subcommand; exits with status 2 if they are wrong."""
    word = COMMANDS[argv[0]]
    parser = argparse.ArgumentParser(
        prog=f"titan {argv[0]}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description=textwrap.fill(word.text[0].upper() + word.text[1:] + ".", _width()),
        epilog="\n".join(["examples:", *(f"  {line}" for line in word.examples)]),
    )
    parser.set_defaults(commands=COMMANDS)
    command.add_arguments(parser)
    try:
        return parser.parse_intermixed_args(argv[1:])  # options may stand between the KEY=VALUE arguments
    except TypeError:  # raised for a command with subcommands, whose options argparse cannot intermix
        args, rest = parser.parse_known_args(argv[1:])
        if rest and (not hasattr(args, "values") or any(word.startswith("-") for word in rest)):
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        if rest:
            args.values += rest  # KEY=VALUE after an option
        return args


if __name__ == "__main__":
    sys.exit(main())
