"""`titan report --to TRACKER`: copy the records of finished runs to a tracker, by the same classes as during training.
`titan report --send`: send wandb's offline files to wandb's server, from a machine with network access.
"""

import argparse
import contextlib
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError, Exit, RunError
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.config.registry import TRACKERS
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.observe import trackers
from titan_hydra.experiments.compose.change import change
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.find import Selection
from titan_hydra.experiments.runs.view import choose

LIMIT = 15  # seconds within which wandb's server must answer


def add_copies(parser: argparse.ArgumentParser) -> None:
    """Add the options that copy runs to a tracker instead of reporting them."""
    group = parser.add_argument_group("to a tracker, instead of a report (without TARGET: all runs)")
    group.add_argument(
        "values",
        nargs="*",
        metavar="KEY=VALUE",
        help="with --to: values for this copy, such as metrics.wandb.project=mine, metrics.wandb.tags=[a,b] or notes='...'",
    )
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--to",
        choices=sorted(TRACKERS),
        help="copy runs: tensorboard writes event files to the run directory, wandb writes offline files there; existing "
        "files of the tracker there are replaced",
    )
    where.add_argument("--send", action="store_true", help="send wandb's offline files to its server")
    group.add_argument("--dry", action="store_true", help="only list what would be copied or sent")
    group.add_argument(
        "--minutes", type=float, default=60, metavar="N", help="with --send: stop after N minutes (default: 60)"
    )


def asks_for_copies(args: argparse.Namespace) -> bool:
    """Whether the options ask for copies. Raises ConfigError for what goes only with them."""
    if (args.values or args.dry) and not (args.to or args.send):
        raise ConfigError(f"{args.values[0] if args.values else '--dry'}: goes with --to TRACKER, which copies runs")
    return bool(args.to or args.send)


def copy_or_send(args: argparse.Namespace) -> int:
    """Copy or send the records of runs. Returns 0 if everything was copied or sent, 1 if the tracker or its server
    failed, and 2 if a value is wrong or a run cannot be copied.
    """
    selection = choose(args.target or str(args.runs), args.runs)
    if args.send:
        if args.values:
            raise ConfigError(f"{args.values[0]}: --send takes no KEY=VALUE; --to wandb copies a run with other values")
        return _send(selection, args.dry, args.minutes)
    directories = [cell.directory for cell in selection.cells]
    errors = [error for directory in directories if (error := copy(directory, args.values, args.to, args.dry))]
    if len(errors) < len(directories) and not args.dry:
        folder = shlex.quote(str(directories[0].parent))
        hints = {
            "tensorboard": f"  look: tensorboard --logdir {folder}",
            "wandb": f"  send what is offline: titan report {folder} --send",
        }
        print(hints[args.to])
    return max((error.status for error in errors), default=Exit.DONE)


def copy(directory: Path, values: list[str], name: str, dry: bool) -> RunError | None:
    """Copy one run and print the outcome. Returns the error, or None after a success."""
    try:
        job, state = change(load_job(directory), [f"metrics.trackers=[{name}]", *values]), rundir.state(directory)
        if state.kind == "running":
            raise ConfigError("is running; copy it after it has ended")
        if not layout.METRICS.of(directory).is_file():
            raise ConfigError("has recorded nothing yet")
        if name == "tensorboard" and not dry:
            shutil.rmtree(layout.TENSORBOARD.of(directory), ignore_errors=True)
        try:
            if not dry:
                trackers.open_tracker(name, job, Run(directory, layout.ATTEMPT.of(directory, state.attempt))).close()
        except Exception as error:  # a tracker's library may raise any exception
            raise RunError(f"{name} failed, nothing was copied: {error}") from error
    except RunError as error:
        print(f"{directory.name}: {error}", file=sys.stderr)
        return error
    print(f"{directory.name}: {'would be copied' if dry else 'copied'} to {name}")
    return None


def _send(selection: Selection, dry: bool, minutes: float) -> int:
    """Print, then send, wandb's offline files of the selected runs."""
    waiting = [folder for cell in selection.cells for folder in unsent(cell.directory)]
    if not waiting:
        print(f"{selection.name}: nothing to send; only runs with metrics.trackers=[wandb] record for wandb")
        return Exit.DONE
    for folder in waiting:
        print(folder, flush=True)
    if dry:
        return Exit.DONE
    if why := unreachable():
        print(f"wandb cannot be reached: {why}; nothing was sent", file=sys.stderr)
        return Exit.BUG
    with contextlib.suppress(subprocess.TimeoutExpired):
        # One call sends all folders: wandb sends the files of a run in order, and those of different runs in parallel.
        command = [sys.executable, "-m", "wandb", "sync", "--yes", *map(str, waiting)]
        if subprocess.run(command, timeout=60 * minutes).returncode == 0:
            return Exit.DONE
    left = sum(bool(unsent(cell.directory)) for cell in selection.cells)
    print(
        f"wandb did not accept everything: {counted(left, 'run')} left; the same command tries again", file=sys.stderr
    )
    return Exit.BUG


def unreachable() -> str:
    """Return why wandb's server does not answer; "" if it does. This is called before sending, as wandb would wait for
    the server without limit.
    """
    import wandb

    address = wandb.setup().settings.base_url
    try:
        urllib.request.urlopen(address, timeout=LIMIT).close()
    except urllib.error.HTTPError:  # an answer with an error status is an answer too
        return ""
    except (OSError, ValueError) as error:
        return f"{address}: {getattr(error, 'reason', None) or error}"
    return ""


def unsent(directory: Path) -> list[Path]:
    """Return those of wandb's folders in a run that are not marked as sent, the oldest first."""
    return [
        folder
        for folder in sorted(layout.WANDB.of(directory).glob("offline-run-*"))
        if not any(folder.glob("*.synced"))
    ]
