"""`titan score-pairs`: compute the log-probabilities that a reference model gives to both answers of each pair."""

import argparse
from pathlib import Path

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.commands.model import add_model, model_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "a folder of `titan convert --to hf`")
    parser.add_argument(
        "pairs", type=Path, metavar="FILE", help="JSONL file of pairs: prompt, chosen and rejected on each line"
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="JSONL file to write, for data=preference data.path=FILE",
    )


def main(args: argparse.Namespace) -> int:
    """Write the scored pairs."""
    if not args.pairs.is_file():
        raise ConfigError(f"{args.pairs}: no such file")
    if args.out.exists():
        raise ConfigError(f"--out={args.out}: exists already")
    from .score import score_pairs

    rows = score_pairs(model_at(args), args.pairs, args.out, args.dtype, args.tokenizer)
    print(f"{args.out}: {rows:,} pairs")
    return Exit.DONE
