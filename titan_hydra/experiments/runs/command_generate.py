"""`titan generate`: continue a text with the model of a run or checkpoint. `titan generate scores`: compute the
log-probability that a model (of a run, checkpoint or export) gives each text of a file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config.fault import bad_value, counted
from titan_hydra.core.job.config.files import require_new

from .command_model import add_model, model_at

if TYPE_CHECKING:
    from titan_hydra.core.checkpoint.opened import Opened


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="the text to continue (default: none, to begin a new document)"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that generates text: the model, and how tokens are sampled."""
    add_model(parser, "a folder of `titan checkpoint export`")
    parser.add_argument(
        "--max-tokens", type=int, default=100, metavar="N", help="maximum number of new tokens (default: 100)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        help="softmax temperature; with 0, always take the likeliest token (default: that of the model's generation "
        "settings, else 1)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        metavar="K",
        help="sample from the K likeliest tokens; with 0, from all tokens (default: as for --temperature, else 0)",
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the fewest likeliest tokens with this probability together (default: as for --temperature, else 1)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random draws (default: 0)")


def main(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation, token by token."""

    def document(opened: Opened) -> list[int]:
        # if the tokenizer has no begin-of-text token, a document begins after the previous document's end-of-text token
        return opened.tokenizer.document(args.prompt)[:-1] or [opened.tokenizer.eos_id]

    return print_continuation(args, document, shown=args.prompt)


def print_continuation(
    args: argparse.Namespace, beginning: Callable[[Opened], list[int]], shown: str = "", special: bool = True
) -> int:
    """Print `shown`, then the tokens that continue those of `beginning(model)`. The continuation ends before the first
    token that ends a generation of the model, or after --max-tokens tokens. Without `special`, special tokens are not
    printed.
    """
    if args.max_tokens < 1:
        raise bad_value("--max-tokens", args.max_tokens, "must be at least 1", 1)
    if args.top_k is not None and args.top_k < 0:
        raise bad_value("--top-k", args.top_k, "must not be negative", 0)
    if args.top_p is not None and not 0 < args.top_p <= 1:
        raise bad_value("--top-p", args.top_p, "must be above 0 and at most 1", 1)
    if args.temperature is not None and not (args.temperature >= 0 and math.isfinite(args.temperature)):
        raise bad_value("--temperature", args.temperature, "must be a number, and not negative", 0, 1)
    from titan_hydra.core.checkpoint.opened import open_model
    from titan_hydra.core.train.generate import generate, sampling_of

    opened = open_model(model_at(args), args.tokenizer)
    sampling = sampling_of(opened.facts, args.temperature, args.top_k, args.top_p)
    pieces = generate(opened, beginning(opened), args.max_tokens, sampling, args.seed, args.dtype, special)
    # `next` comes before the output, so that errors are raised before the prompt is printed
    print(shown, next(pieces), sep="", end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return Exit.DONE


def score_file_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "a folder of `titan checkpoint export`")
    parser.add_argument(
        "texts",
        type=Path,
        metavar="FILE",
        help="file of texts, as for data.path: .jsonl, .csv, .parquet or .md, or one of these compressed; or .txt, "
        "with one text on each line",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="JSONL file to write, with row, nats and tokens of each text (default: print them)",
    )
    parser.add_argument(
        "--text-key", default="text", metavar="KEY", help="name of the column that holds the text (default: text)"
    )
    parser.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="length of a window in tokens; a longer text is read in windows that overlap by half "
        "(default: the run's data.seq_len; for an export, model.max_seq_len)",
    )


def score_file(args: argparse.Namespace) -> int:
    """Write a line for each text, and print the mean log-probability of all texts."""
    if args.context is not None and args.context < 1:
        raise bad_value("--context", args.context, "must be at least 1", 1)
    if args.out:
        require_new(args.out)
    from titan_hydra.core.train.score import score_texts

    texts = nats = tokens = 0
    with contextlib.ExitStack() as opened:
        out = sys.stdout
        for scored in score_texts(model_at(args), args.texts, args.text_key, args.context, args.dtype, args.tokenizer):
            # the file is opened only at the first line, so that an earlier error leaves no empty file
            if args.out and not texts:
                out = opened.enter_context(_open_new(args.out))
            print(json.dumps(scored), file=out)
            texts, nats, tokens = texts + 1, nats + scored["nats"], tokens + scored["tokens"]
    print(
        f"{args.out or args.texts}: {counted(texts, 'text')}, {tokens:,} tokens, {nats / tokens:.4f} nats per token",
        file=sys.stdout if args.out else sys.stderr,
    )
    return Exit.DONE


def _open_new(file: Path) -> TextIO:
    try:
        return file.open("x")
    except OSError as error:
        raise ConfigError(f"--out={file}: cannot be written ({error.strerror})") from error
