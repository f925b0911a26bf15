"""The `titan` command. Each subcommand is a module with `add_arguments(parser)` and `main(args) -> exit status`."""
from __future__ import annotations

import argparse
import importlib
import sys

from titan_hydra import __version__
from titan_hydra.config.status import Exit, RunError

COMMANDS = {  # name: (module, what it does); a module is imported only when its command is given
    "verify": ("titan_hydra.train.verify_cli", "prove that layouts learn what one process learns"),
    "convert": ("titan_hydra.train.convert", "checkpoints to and from Hugging Face safetensors"),
    "tokenizer": ("titan_hydra.train.tokenizer_cli", "train a tokenizer, or encode text files to a .bin"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand. What the user got wrong is one line on stderr; tracebacks are for bugs."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="titan", description="Companion of launch.py.")
    parser.add_argument("--version", action="version", version=f"titan_hydra {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    modules = {}
    for name, (module, text) in COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name in argv[:1]:
            modules[name] = importlib.import_module(module)
            modules[name].add_arguments(command)
    args = parser.parse_args(argv)
    try:
        return modules[args.command].main(args)
    except RunError as error:
        print(error, file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        sys.stderr.close()
        return Exit.DONE


if __name__ == "__main__":
    sys.exit(main())
