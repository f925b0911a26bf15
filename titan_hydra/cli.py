"""The `titan` command. Each subcommand is a module with `add_arguments(parser)` and `main(args) -> exit status`."""

import argparse
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from titan_hydra.core.base.errors import Exit, RunError, denied, require_folder
from titan_hydra.core.base.text import all_printed, not_printed, ready_to_print, unprintable
from titan_hydra.core.job.config.additions import of_all
from titan_hydra.core.job.config.fault import did_you_mean, shown, suggest

from . import __version__

COMMANDS = {  # name: (module, what it does); a module is imported only when its command is given
    "plan": (
        "titan_hydra.experiments.plan.command_plan",
        "which layouts would fit N GPUs, and how fast they would be; --tune runs the best, --calibrate fits the rates to runs",
    ),
    "init": (
        "titan_hydra.experiments.runs.command_init",
        "write a project of your own: launch.py, options, a model, a sweep, a test",
    ),
    "status": (
        "titan_hydra.experiments.runs.command_status",
        "the states of runs, in one table; -f follows them; --all: a line for each sweep and run",
    ),
    "logs": (
        "titan_hydra.experiments.runs.command_logs",
        "the log of a rank; -f follows it; --guilty: why the run failed; --hang: which rank is late",
    ),
    "cancel": ("titan_hydra.experiments.runs.command_cancel", "stop running and queued runs"),
    "retry": (
        "titan_hydra.experiments.launch.command_retry",
        "run failed cells again, all or by the class of their failure",
    ),
    "resume": (
        "titan_hydra.experiments.launch.command_resume",
        "continue the same run on other GPUs or in another layout: gpus=N, parallelism=OPTION",
    ),
    "extend": (
        "titan_hydra.experiments.launch.command_extend",
        "train a run longer: a new run with steps=N, from a checkpoint of the first",
    ),
    "report": ("titan_hydra.experiments.report.command_report", "the table of a sweep, its plots and its page"),
    "compare": (
        "titan_hydra.experiments.report.command_compare",
        "how two runs differ, and the first step and module at which they diverge",
    ),
    "track": (
        "titan_hydra.experiments.runs.command_track",
        "copy what runs recorded to wandb or TensorBoard; --send: send wandb's offline files",
    ),
    "cluster": (
        "titan_hydra.experiments.launch.command_cluster",
        "init: write conf/cluster/NAME.yaml for the cluster of this machine; check: what works there, on two nodes",
    ),
    "checkpoint": (
        "titan_hydra.experiments.runs.command_checkpoint",
        "list, verify and prune the checkpoints of a run",
    ),
    "convert": ("titan_hydra.experiments.runs.command_convert", "checkpoints to and from Hugging Face safetensors"),
    "generate": (
        "titan_hydra.experiments.runs.command_generate",
        "let the model of a run or checkpoint continue a text",
    ),
    "score": (
        "titan_hydra.experiments.runs.command_score",
        "the log-probability that the model of a run or export gives each text of a file",
    ),
    "tokenizer": (
        "titan_hydra.experiments.runs.command_tokenizer",
        "train a tokenizer, or encode text files to a .bin",
    ),
    **of_all("COMMANDS"),
    "completion": (
        "titan_hydra.experiments.runs.command_completion",
        "let bash, zsh or fish complete titan's commands and options",
    ),
}
RENAMED = {  # former subcommands, and what replaces each
    "ls": "titan status --all",
    "flight": "titan logs RUN --hang",
    "diff": "titan compare A B",
    "sync": "titan track --send",
    "tune": "titan plan --tune K",
    "from-torchtitan": "a page, docs/coming-from.md: TorchTitan itself has no TOML any more",
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand. A user's mistake is printed as one line on stderr; only bugs print a traceback."""
    argv = sys.argv[1:] if argv is None else argv
    ready_to_print()
    for old, new in of_all("RENAMED").items():
        command, word = old.split()
        if argv[:1] == [command] and word in argv[1:]:
            print(f"titan {old}: is `titan {new}` now", file=sys.stderr)
            return Exit.CONFIG
    if argv[:1] and argv[0] in COMMANDS:
        module, text = COMMANDS[argv[0]]
        command = importlib.import_module(module)
        args = _arguments(command, argv, text)
    else:
        listing = "\n".join(f"  {name:<15} {text}" for name, (_, text) in COMMANDS.items())
        parser = argparse.ArgumentParser(
            prog="titan",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            usage="titan COMMAND ...   (titan COMMAND --help)",
            description=f"Follows, compares and prepares the runs of launch.py.\n\n{listing}",
        )
        parser.add_argument("--version", action="version", version=f"titan_hydra {__version__}")
        parser.add_argument("command", metavar="COMMAND", help=argparse.SUPPRESS)
        word = parser.parse_known_args(argv or ["--help"])[0].command
        hint = did_you_mean(suggest(word, list(COMMANDS)), otherwise="; `titan` lists them")
        if word in RENAMED:
            hint = f"; it is now {RENAMED[word]}"
        print(f"titan {shown(word)}: no such command{hint}", file=sys.stderr)
        return Exit.CONFIG
    return _run(command.main, args)


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


def _arguments(command: ModuleType, argv: list[str], text: str) -> argparse.Namespace:
    """Parse the arguments of a subcommand; exits with status 2 if they are wrong."""
    parser = argparse.ArgumentParser(prog=f"titan {argv[0]}", description=text[0].upper() + text[1:] + ".")
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
