"""`titan sync`: send the offline files that wandb left in run directories to its server. For a machine with network
access.
"""

import argparse
import contextlib
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from titan_hydra.base.errors import Exit
from titan_hydra.config.fault import counted
from titan_hydra.runs import layout
from titan_hydra.runs.view import add_target, choose

LIMIT = 15  # seconds for wandb's server to answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser, "all runs")
    parser.add_argument("--dry", action="store_true", help="only show what would be sent")
    parser.add_argument("--minutes", type=float, default=60, metavar="N", help="stop after so long (default: 60)")


def main(args: argparse.Namespace) -> int:
    """Send the files. Returns 0 if everything was sent, 1 if wandb failed or its server cannot be reached."""
    selection = choose(args.target or str(args.runs), args.runs)
    waiting = [folder for cell in selection.cells for folder in unsent(cell.directory)]
    if not waiting:
        print(f"{selection.name}: nothing to send; only runs with metrics.trackers=[wandb] record for wandb")
        return Exit.DONE
    for folder in waiting:
        print(folder, flush=True)
    if args.dry:
        return Exit.DONE
    if why := unreachable():
        print(f"wandb cannot be reached: {why}; nothing was sent", file=sys.stderr)
        return Exit.BUG
    with contextlib.suppress(subprocess.TimeoutExpired):
        # One call: wandb sends the files of one run in their order, and those of different runs at once.
        command = [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, waiting)]
        if subprocess.run(command, timeout=60 * args.minutes).returncode == 0:
            return Exit.DONE
    left = sum(bool(unsent(cell.directory)) for cell in selection.cells)
    print(f"wandb did not take everything: {counted(left, 'run')} left; the same line tries again", file=sys.stderr)
    return Exit.BUG


def unreachable() -> str:
    """Return why wandb's server does not answer; "" if it does. Checked first, as wandb itself would wait for it
    without limit.
    """
    import wandb

    address = wandb.setup().settings.base_url
    try:
        urllib.request.urlopen(address, timeout=LIMIT).close()
    except urllib.error.HTTPError:  # an answer
        return ""
    except (OSError, ValueError) as error:
        return f"{address}: {getattr(error, 'reason', None) or error}"
    return ""


def unsent(directory: Path) -> list[Path]:
    """Return wandb's folders of a run that are not marked as sent, the oldest first."""
    return [folder for folder in sorted(layout.WANDB.of(directory).glob("offline-run-*")) if not any(folder.glob("*.synced"))]
