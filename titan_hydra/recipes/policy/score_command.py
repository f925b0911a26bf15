"""`titan data score-pairs`: compute the log-probabilities that a reference model gives to both answers of each pair; and
`titan data score-rollouts`: those that a model gives to the sampled tokens of each rollout.
"""

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config.files import require_new
from titan_hydra.experiments.runs.bad_rows import RowsLeftOut, add_max_bad_rows
from titan_hydra.experiments.runs.command_model import add_model, model_at

LOGPROBS = ("ref_logprobs", "old_logprobs")  # the columns that score-rollouts can write


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_files(parser, "pairs, .jsonl or .parquet: prompt, chosen and rejected in each row", "preference")


def of_rollouts_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of score-rollouts."""
    _add_files(parser, "rollouts, .jsonl or .parquet: tokens, old_logprobs and advantages in each row", "rollouts")
    parser.add_argument(
        "--column",
        choices=LOGPROBS,
        default=LOGPROBS[0],
        help="column to write; old_logprobs replaces the numbers of the program that sampled (default: %(default)s)",
    )


def _add_files(parser: argparse.ArgumentParser, rows: str, source: str) -> None:
    add_model(parser, "a folder of `titan checkpoint export`")
    parser.add_argument("file", type=Path, metavar="FILE", help=f"file of {rows}")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help=f"JSONL file to write, for data={source} data.path=FILE",
    )
    add_max_bad_rows(parser)


def main(args: argparse.Namespace) -> int:
    """Write the scored pairs."""
    from .score import score_pairs

    return _write(args, "pairs", score_pairs)


def of_rollouts(args: argparse.Namespace) -> int:
    """Write the scored rollouts."""
    from .score import score_rollouts

    return _write(args, "rollouts", partial(score_rollouts, column=args.column))


def _write(args: argparse.Namespace, rows: str, score: Callable[..., int]) -> int:
    """Score the rows of a file into a new file, and print their number."""
    if not args.file.is_file():
        raise ConfigError(f"{args.file}: no such file")
    require_new(args.out)
    bad = RowsLeftOut(args.max_bad_rows)
    number = score(model_at(args), args.file, args.out, dtype=args.dtype, tokenizer_file=args.tokenizer, bad=bad)
    print(f"{args.out}: {number:,} {rows}{bad}")
    return Exit.DONE
