"""`titan checkpoint`: list, verify and prune the checkpoints of a run. Reads files only and imports no torch."""

import argparse
from datetime import datetime
from math import inf
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.core.job.run.run import newest_attempt
from titan_hydra.experiments.runs.rundir import host_of_running
from titan_hydra.experiments.runs.view import add_runs, choose_one

LEFT_BEHIND = {
    checkpoints.WRITING: "being written, or left by a kill",
    checkpoints.DAMAGED: "set aside as damaged",
    checkpoints.DELETING: "being deleted",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="what", required=True, metavar="ls|verify|prune")
    for name, text in (
        ("ls", "list the steps of a run"),
        ("verify", "compare every byte with the manifest; exit status 1 if some byte differs"),
        ("prune", "delete steps that need not be kept, damaged steps, and what a killed run has left behind"),
    ):
        command = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        step = ", or one step's folder" if name == "verify" else ""
        command.add_argument("run", help=f"run directory, or start of a run's hash{step}")
        add_runs(command)
        if name == "prune":
            command.add_argument(
                "--keep", type=int, required=True, help="how many of the newest steps to keep, at least 1"
            )
            command.add_argument(
                "--every", type=int, default=0, help="also keep the steps that are multiples of this number"
            )
            command.add_argument("--dry", action="store_true", help="only print what would be deleted")


def main(args: argparse.Namespace) -> int:
    if args.what == "verify" and layout.MANIFEST.of(Path(args.run)).is_file():
        return _verify([Path(args.run)])
    run = choose_one(args.run, args.runs).directory
    steps = layout.CHECKPOINTS.of(run)
    if args.what == "ls":
        return ls(steps)
    if args.what == "verify":
        return _verify(checkpoints.complete(steps) or _none(steps))
    if args.keep < 1:
        raise ConfigError(f"--keep {args.keep}: a run keeps at least one checkpoint")
    attempt = newest_attempt(run)
    if attempt and (host := host_of_running(layout.ATTEMPT.of(run, attempt))):
        raise ConfigError(
            f"{run.name} is running on {host}, and deletes old checkpoints itself (checkpoint.keep_latest_k)"
        )
    keep_best = layout.CONFIG.read(run).get("checkpoint", {}).get("keep_best", False)
    return prune(steps, args.keep, args.every, keep_best, args.dry)


def ls(steps: Path) -> int:
    """Print a line for each step, the oldest first, then a line for each folder of an interrupted or damaged
    checkpoint.
    """
    best = checkpoints.best(steps)
    for path in checkpoints.complete(steps) or _none(steps):
        manifest = checkpoints.read_manifest(path)
        if manifest is None:
            print(f"{path.name}  {_size(path):>10}  no manifest: damaged")
            continue
        when = datetime.fromtimestamp(manifest["time"]).strftime("%Y-%m-%d %H:%M")
        held_out, loss = "", checkpoints.held_out_loss(path)
        if loss != inf:
            held_out = f"  held out {loss:.4f}{' (lowest)' if path == best else ''}"
        print(f"{path.name}  {_size(path):>10}  {when}  {counted(manifest['world_size'], 'rank')}{held_out}")
    for path in _left_behind(steps):
        print(f"{path.name}  {_size(path):>10}  {LEFT_BEHIND[path.suffix]}")
    return Exit.DONE


def _verify(paths: list[Path]) -> int:
    """Check every file of the checkpoints against their manifests. Returns 1 if any byte differs."""
    status = Exit.DONE
    for path in paths:
        problems = checkpoints.damage(path)
        print(f"{path.name}  {'damaged: ' + '; '.join(problems) if problems else 'intact'}", flush=True)
        status = Exit.BUG if problems else status
    return status


def prune(steps: Path, keep: int, every: int, keep_best: bool, dry: bool) -> int:
    """Delete all steps that the options do not keep, except the newest intact step, which is never deleted."""
    for intact in reversed(checkpoints.complete(steps)):
        if not checkpoints.damage(intact):
            break
    else:
        raise ConfigError(f"{steps}: no checkpoint is intact; nothing is deleted")
    going = [path for path in checkpoints.surplus(steps, keep, every, keep_best) if path != intact] + _left_behind(
        steps
    )
    for path in going:
        print(f"{path.name}  {_size(path):>10}  {'would be deleted' if dry else 'deleted'}")
    if not dry:
        waste = checkpoints.Bin()
        waste.throw(going)
        waste.wait()
    return Exit.DONE


def _none(steps: Path) -> list[Path]:
    raise ConfigError(f"{steps}: no checkpoint is complete")


def _left_behind(steps: Path) -> list[Path]:
    return sorted(path for path in steps.iterdir() if path.suffix in LEFT_BEHIND) if steps.is_dir() else []


def _size(path: Path) -> str:
    return f"{sum(file.lstat().st_size for file in path.iterdir()) / 2**20:,.1f} MiB"
