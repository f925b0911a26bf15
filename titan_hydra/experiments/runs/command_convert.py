"""`titan convert`: convert checkpoints to and from Hugging Face's format."""

import argparse
import contextlib
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.run.checkpoints import asked_for
from titan_hydra.experiments.runs.view import add_runs, place_of

from .command_model import add_imports, add_step, add_tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        help="a run directory, the start of a run's hash, or a checkpoint's folder; with --from, a folder in Hugging Face's format",
    )
    direction = parser.add_mutually_exclusive_group(required=True)
    direction.add_argument(
        "--to",
        choices=["hf", "peft"],
        help="export to this format; for a model with adapters, hf exports the merged weights, and peft only the adapters",
    )
    direction.add_argument("--from", dest="origin", choices=["hf"], help="import from this format")
    parser.add_argument("target", type=Path, help="folder to write to; without --replace, it must be new or empty")
    parser.add_argument(
        "--replace",
        action="store_true",
        help="replace the weights that the target holds; its readers see either the old folder or the new one",
    )
    add_step(parser)
    add_tokenizer(parser)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="dtype of exported weights (default: as stored)"
    )
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        default=5.0,
        help="maximum size of an exported file in GB, which are 10^9 bytes (default: 5)",
    )
    parser.add_argument(
        "--config", type=Path, help="config.json of the run (default: the file two folders above the checkpoint)"
    )
    add_imports(parser)
    add_runs(parser)


def main(args: argparse.Namespace) -> int:
    """Convert the weights, and print what was written. Raises ConfigError or CheckpointError."""
    from titan_hydra.core.checkpoint.exchange import replacing

    if args.step and not args.to:
        raise ConfigError("--step: needs --to; --from reads a Hugging Face folder")
    if args.imports and args.to:
        raise ConfigError("--imports: needs --from; a run names its own modules")
    if args.tokenizer and args.to != "hf":
        raise ConfigError("--tokenizer: needs --to hf; other formats have no tokenizer of their own")
    with replacing(args.target) if args.replace else contextlib.nullcontext(args.target) as folder:
        told = _convert(args, folder)
    print(f"{args.target}: {told}")
    return 0


def _convert(args: argparse.Namespace, target: Path) -> str:
    """Write the conversion into a folder, and return a line about it."""
    from titan_hydra.core.checkpoint import convert

    dtype = convert.DTYPES.get(args.dtype)
    if not args.to:
        convert.import_hf(Path(args.source), target, dtype, args.imports)
        return f"a checkpoint; start from it with checkpoint.initial_load_path={args.target}"
    source = asked_for(place_of(args.source, args.runs), args.step)
    if args.to == "peft":
        from titan_hydra.core.checkpoint.adapters import export_peft

        number = export_peft(source, target, dtype or convert.DTYPES["float32"], args.config)
        return f"the adapters of {counted(number, 'linear')}; load with peft.PeftModel.from_pretrained"
    files, found = convert.export_hf(source, target, dtype, args.max_shard_gb, args.config, args.tokenizer)
    return f"{counted(len(files), 'file')} of weights in {str(found).removeprefix('torch.')}; load with from_pretrained"
