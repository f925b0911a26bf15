"""`titan score`: compute the log-probability that a model (of a run, checkpoint or export) assigns to each text of a
file.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import TextIO

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.job.config.fault import bad_value, counted

from .command_model import add_model, model_at


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model(parser, "a folder of `titan convert --to hf`")
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


def main(args: argparse.Namespace) -> int:
    """Write a line for each text, and print the mean log-probability of all texts."""
    if args.context is not None and args.context < 1:
        raise bad_value("--context", args.context, "must be at least 1", 1)
    if args.out and args.out.exists():
        raise ConfigError(f"--out={args.out}: exists already")
    from titan_hydra.core.train.score import score_texts

    texts = nats = tokens = 0
    with contextlib.ExitStack() as opened:
        out = sys.stdout
        for found in score_texts(model_at(args), args.texts, args.text_key, args.context, args.dtype, args.tokenizer):
            if (
                args.out and not texts
            ):  # the file is opened only at the first line, so that an earlier error leaves no empty file
                out = opened.enter_context(_open_new(args.out))
            print(json.dumps(found), file=out)
            texts, nats, tokens = texts + 1, nats + found["nats"], tokens + found["tokens"]
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
