"""`titan data score-pairs`: compute the log-probabilities that a reference model gives to both answers of each pair."""

import argparse
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.experiments.runs.bad_rows import RowsLeftOut, add_max_bad_rows
from titan_hydra.experiments.runs.command_model import add_model, model_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "a folder of `titan checkpoint export`")
    parser.add_argument(
        "pairs",
        type=Path,
        metavar="FILE",
        help="file of pairs, .jsonl or .parquet: prompt, chosen and rejected in each row",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL file to write, for data=preference data.path=FILE",
    )
    add_max_bad_rows(parser)


def main(args: argparse.Namespace) -> int:
    """Write the scored pairs."""
    if not args.pairs.is_file():
        raise ConfigError(f"{args.pairs}: no such file")
    if args.out.exists():
        raise ConfigError(f"--out={args.out}: exists already")
    from .score import score_pairs

    bad = RowsLeftOut(args.max_bad_rows)
    rows = score_pairs(model_at(args), args.pairs, args.out, args.dtype, args.tokenizer, bad)
    print(f"{args.out}: {rows:,} pairs{bad}")
    return Exit.DONE
