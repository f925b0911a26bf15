"""`titan checkpoint`: list, verify and prune the checkpoints of a run, which reads files only and imports no torch; export
and import weights in Hugging Face's format.
"""

import argparse
import contextlib
from datetime import datetime
from math import inf
from pathlib import Path

from titan_hydra.core.base.amounts import in_bytes
from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.core.job.run.checkpoints import asked_for
from titan_hydra.core.job.run.run import newest_attempt
from titan_hydra.experiments.runs.rundir import host_of_running
from titan_hydra.experiments.runs.view import add_runs, choose_one, place_of

from .command_model import add_imports, add_step, add_tokenizer

LEFT_BEHIND = {
    checkpoints.WRITING: "being written, or left by a kill",
    checkpoints.DAMAGED: "set aside as damaged",
    checkpoints.DELETING: "being deleted",
}


def list_steps_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)


def list_steps(args: argparse.Namespace) -> int:
    """Print a line for each step of a run."""
    return ls(layout.CHECKPOINTS.of(choose_one(args.run, args.runs).directory))


def verify_steps_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser, ", or one step's folder")


def verify_steps(args: argparse.Namespace) -> int:
    """Check every file of a run's steps, or of one step."""
    if layout.MANIFEST.of(Path(args.run)).is_file():
        return _verify([Path(args.run)])
    steps = layout.CHECKPOINTS.of(choose_one(args.run, args.runs).directory)
    return _verify(checkpoints.complete(steps) or _none(steps))


def prune_steps_arguments(parser: argparse.ArgumentParser) -> None:
    _add_run(parser)
    parser.add_argument("--keep", type=int, required=True, help="how many of the newest steps to keep, at least 1")
    parser.add_argument("--every", type=int, default=0, help="also keep the steps that are multiples of this number")
    parser.add_argument("--dry", action="store_true", help="only print what would be deleted")


def prune_steps(args: argparse.Namespace) -> int:
    """Delete the steps of a run that the options do not keep. Raises ConfigError if the run is running."""
    run = choose_one(args.run, args.runs).directory
    if args.keep < 1:
        raise ConfigError(f"--keep {args.keep}: a run keeps at least one checkpoint")
    attempt = newest_attempt(run)
    if attempt and (host := host_of_running(layout.ATTEMPT.of(run, attempt))):
        raise ConfigError(
            f"{run.name} is running on {host}, and deletes old checkpoints itself (checkpoint.keep_latest_k)"
        )
    keep_best = layout.CONFIG.read(run).get("checkpoint", {}).get("keep_best", False)
    return prune(layout.CHECKPOINTS.of(run), args.keep, args.every, keep_best, args.dry)


def _add_run(parser: argparse.ArgumentParser, further: str = "") -> None:
    parser.add_argument("run", metavar="RUN", help=f"run directory, or start of a run's hash{further}")
    add_runs(parser)


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
    return in_bytes(sum(file.lstat().st_size for file in path.iterdir()))


def export_weights_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="RUN", help="a run directory, the start of a run's hash, or a checkpoint's folder"
    )
    _add_target(parser)
    parser.add_argument(
        "--format",
        choices=["hf", "peft"],
        default="hf",
        help="for a model with adapters, hf has the merged weights, and peft only the adapters (default: hf)",
    )
    parser.add_argument(
        "--ema", action="store_true", help="write the moving averages of the weights (optimizer.ema_decay)"
    )
    add_step(parser)
    add_tokenizer(parser)
    _add_dtype(parser)
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        default=5.0,
        help="maximum size of an exported file in GB, which are 10^9 bytes (default: 5)",
    )
    parser.add_argument(
        "--config", type=Path, help="config.json of the run (default: the file two folders above the checkpoint)"
    )
    add_runs(parser)


def export_weights(args: argparse.Namespace) -> int:
    """Write a checkpoint's weights in Hugging Face's format. Raises ConfigError or CheckpointError."""
    from titan_hydra.core.checkpoint import convert

    if args.tokenizer and args.format != "hf":
        raise ConfigError("--tokenizer: needs --format hf; other formats have no tokenizer of their own")
    if args.ema and args.format != "hf":
        raise ConfigError("--ema: needs --format hf, which merges the averages of adapters")
    dtype = convert.DTYPES.get(args.dtype)
    with _folder(args) as target:
        source = asked_for(place_of(args.source, args.runs), args.step)
        if args.format == "peft":
            from titan_hydra.core.checkpoint.convert import export_peft

            number = export_peft(source, target, dtype or convert.DTYPES["float32"], args.config)
            summary = f"the adapters of {counted(number, 'linear')}; load with peft.PeftModel.from_pretrained"
        else:
            files, stored_dtype = convert.export_hf(
                source, target, dtype, args.max_shard_gb, args.config, args.tokenizer, args.ema
            )
            dtype_name = str(stored_dtype).removeprefix("torch.")
            summary = f"{counted(len(files), 'file')} of weights in {dtype_name}; load with from_pretrained"
    print(f"{args.target}: {summary}")
    return Exit.DONE


def import_weights_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="FOLDER", type=Path, help="a folder in Hugging Face's format")
    _add_target(parser)
    _add_dtype(parser)
    add_imports(parser)


def import_weights(args: argparse.Namespace) -> int:
    """Write a checkpoint from a folder in Hugging Face's format. Raises ConfigError or CheckpointError."""
    from titan_hydra.core.checkpoint import convert

    with _folder(args) as target:
        convert.import_hf(args.source, target, convert.DTYPES.get(args.dtype), args.imports)
    print(f"{args.target}: a checkpoint; start from it with checkpoint.initial_load_path={args.target}")
    return Exit.DONE


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "target", metavar="TARGET", type=Path, help="folder to write to; without --replace, it must be new or empty"
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="replace the weights that the target holds; its readers see either the old folder or the new one",
    )


def _add_dtype(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="dtype of the written weights (default: as stored)"
    )


def _folder(args: argparse.Namespace) -> contextlib.AbstractContextManager[Path]:
    """Return the folder to write: the target or, with --replace, one that takes its place at the end."""
    from titan_hydra.core.checkpoint.convert import replacing

    return replacing(args.target) if args.replace else contextlib.nullcontext(args.target)
