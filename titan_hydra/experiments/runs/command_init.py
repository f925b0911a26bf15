"""`titan init DIR`: write a small project that uses the installed package: launch.py, options, a model, a sweep, and a
test.
"""

import argparse
import shutil
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config.fault import quoted
from titan_hydra.core.job.config.files import ASSETS

PROJECT = ASSETS / "project"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder to write the project to; it must be new or empty"
    )


def main(args: argparse.Namespace) -> int:
    """Write the project and print what to type next. Raises ConfigError if the folder is not empty, or cannot be
    written.
    """
    folder = args.folder.expanduser()
    try:
        if folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: is not empty; titan init writes a new folder")
        folder.mkdir(parents=True, exist_ok=True)
        written = [
            write_copy(file, folder / file.relative_to(PROJECT))
            for file in sorted(PROJECT.rglob("*"))
            if file.is_file() and "__pycache__" not in file.parts
        ]
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error
    print(*written, sep="\n")
    print(f"try: cd {quoted([str(folder)])} && python launch.py debug=tiny model=parallel_llama")
    return Exit.DONE


def write_copy(source: Path, target: Path) -> Path:
    """Copy the content of a file, but not its mode: umask and the folder's group determine the permissions. Returns
    `target`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target
