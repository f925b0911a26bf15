"""`titan sync`: send wandb's offline files, which runs leave in their directories, to its server. For a machine that has a network."""
from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from titan_hydra.config.status import Exit

from .view import add_target, choose


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `titan sync`."""
    add_target(parser)
    parser.add_argument("--dry", action="store_true", help="only show what would be sent")


def main(args: argparse.Namespace) -> int:
    """Exit status 0 when everything was sent, 1 when wandb could not."""
    selection = choose(args.target, args.runs)
    waiting = [folder for cell in selection.cells for folder in unsent(cell.directory)]
    if not waiting:
        print(f"{selection.name}: nothing to send; runs with metrics.trackers=[wandb] leave something")
        return Exit.DONE
    for folder in waiting:
        print(folder, flush=True)
    if args.dry:
        return Exit.DONE
    # One call: wandb sends the files of one run in their order, and those of different runs at once.
    if subprocess.run([sys.executable, "-m", "wandb", "sync", "--yes", *map(str, waiting)]).returncode == 0:
        return Exit.DONE
    left = sum(bool(unsent(cell.directory)) for cell in selection.cells)
    print(f"wandb did not take everything: {left} run{'s' if left > 1 else ''} left; the same line tries again", file=sys.stderr)
    return Exit.BUG


def unsent(directory: Path) -> list[Path]:
    """wandb's folders of a run's attempts that it has not marked as sent, the oldest first."""
    return [folder for folder in sorted(directory.glob("wandb/offline-run-*")) if not any(folder.glob("*.synced"))]
