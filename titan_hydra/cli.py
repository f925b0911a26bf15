"""The `titan` command. Each subcommand is a module with `add_arguments(parser)` and `main(args) -> exit status`."""
from __future__ import annotations

import argparse
import importlib
import sys

from titan_hydra import __version__
from titan_hydra.config.status import Exit, RunError

COMMANDS = {  # name: (module, what it does); a module is imported only when its command is given
    "status": ("titan_hydra.launch.status_cli", "where runs stand, in one table; -f follows them"),
    "ls": ("titan_hydra.launch.ls_cli", "all sweeps and runs, a line each"),
    "logs": ("titan_hydra.launch.logs_cli", "what a rank has printed; -f follows it; --guilty: why the run failed"),
    "cancel": ("titan_hydra.launch.cancel_cli", "stop what runs or waits"),
    "retry": ("titan_hydra.launch.retry_cli", "run failed cells again, all or by the class of their failure"),
    "extend": ("titan_hydra.launch.extend_cli", "train a run longer: a new run from its right checkpoint, with steps=N"),
    "report": ("titan_hydra.report.cli", "the table of a sweep, its plots and its page"),
    "flight": ("titan_hydra.launch.flight_cli", "after a hang: which rank is late, in which collective, at which step"),
    "compare": ("titan_hydra.report.part", "the first step, and the first module, at which two runs part"),
    "diff": ("titan_hydra.launch.diff_cli", "what two runs differ in: configuration, code, results"),
    "track": ("titan_hydra.launch.track_cli", "copy what runs have recorded to wandb or TensorBoard, afterwards"),
    "sync": ("titan_hydra.launch.sync_cli", "send wandb's offline files to its server"),
    "cluster": ("titan_hydra.launch.cluster_cli", "init: write conf/cluster/NAME.yaml for the SLURM of this login node"),
    "verify": ("titan_hydra.train.verify_cli", "prove that layouts learn what one process learns"),
    "checkpoint": ("titan_hydra.launch.checkpoints", "list, verify, prune and convert the checkpoints of a run"),
    "convert": ("titan_hydra.launch.convert_cli", "checkpoints to and from Hugging Face safetensors"),
    "generate": ("titan_hydra.launch.generate_cli", "let the model of a run or checkpoint continue a text"),
    "tokenizer": ("titan_hydra.train.tokenizer_cli", "train a tokenizer, or encode text files to a .bin"),
    "from-torchtitan": ("titan_hydra.launch.torchtitan_cli", "the command line for one of TorchTitan's files, and what it leaves out"),
    "completion": ("titan_hydra.launch.completion_cli", "let bash, zsh or fish complete all this"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand. A mistake of the user's is printed as one line on stderr; tracebacks are for bugs."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] and argv[0] in COMMANDS:
        module, text = COMMANDS[argv[0]]
        command = importlib.import_module(module)
        parser = argparse.ArgumentParser(prog=f"titan {argv[0]}", description=text[0].upper() + text[1:] + ".")
        command.add_arguments(parser)
        try:
            args = parser.parse_intermixed_args(argv[1:])  # options may stand between KEY=VALUE
        except TypeError:  # argparse does not support this for commands with subcommands
            args = parser.parse_args(argv[1:])
    else:
        listing = "\n".join(f"  {name:<15} {text}" for name, (_, text) in COMMANDS.items())
        parser = argparse.ArgumentParser(
            prog="titan", formatter_class=argparse.RawDescriptionHelpFormatter, usage="titan COMMAND ...   (titan COMMAND --help)",
            description=f"Follows, compares and prepares the runs of launch.py.\n\n{listing}")
        parser.add_argument("--version", action="version", version=f"titan_hydra {__version__}")
        parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
        parser.parse_args(argv or ["--help"])
    try:
        return command.main(args)
    except RunError as error:
        print(error, file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has closed it
        sys.stderr.close()
        return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
