"""`titan init DIR`: write a small project that uses the installed package: launch.py, options, a model, a sweep, and a test."""
import argparse
import shutil
from pathlib import Path

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.config.fault import quoted
from titan_hydra.config.files import ASSETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="where to write it; a new or empty folder")


def main(args: argparse.Namespace) -> int:
    """Write the project and print what to type next. Raises ConfigError for a folder that is not empty or cannot be written."""
    folder = args.folder.expanduser()
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: is not empty; titan init writes a new folder")
        shutil.copytree(ASSETS / "project", folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    except OSError as error:
        reason = error.strerror or "cannot be written"  # shutil.Error has none
        raise ConfigError(f"{folder}: {reason}") from error
    for file in sorted(path for path in folder.rglob("*") if path.is_file()):
        print(file)
    print(f"try: cd {quoted([str(folder)])} && python launch.py debug=tiny model=parallel_llama")
    return Exit.DONE
