"""`titan generate`: continue a text with the model of a run or checkpoint."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.config import Fault
from titan_hydra.data.tokenizer import Tokenizer

from .model import add_model, checkpoint_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--prompt", default="", metavar="TEXT", help="the text to continue (default: none, to begin a new document)"
    )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of a command that generates text: the model, and how tokens are sampled."""
    add_model(parser)
    parser.add_argument(
        "--max-tokens", type=int, default=100, metavar="N", help="maximum number of new tokens (default: 100)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="softmax temperature; with 0, always take the likeliest token (default: 1)",
    )
    parser.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample from the K likeliest tokens; with 0, from all tokens (default: 0)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random draws (default: 0)")


def main(args: argparse.Namespace) -> int:
    """Print the prompt and its continuation, token by token."""

    def document(checkpoint: Path, tokenizer: Tokenizer) -> list[int]:
        # if the tokenizer has no begin-of-text token, a document begins after the previous document's end-of-text token
        return tokenizer.document(args.prompt)[:-1] or [tokenizer.eos_id]

    return print_continuation(args, document, lambda tokenizer: {tokenizer.eos_id}, shown=args.prompt)


def print_continuation(
    args: argparse.Namespace,
    beginning: Callable[[Path, Tokenizer], list[int]],
    ends: Callable[[Tokenizer], set[int]],
    shown: str = "",
) -> int:
    """Print `shown`, then the tokens that continue those of `beginning(checkpoint, tokenizer)`. The continuation ends
    before the first token of `ends(tokenizer)`, or after --max-tokens tokens.
    """
    if args.max_tokens < 1:
        raise ConfigError(str(Fault("--max-tokens", args.max_tokens, "must be at least 1", legal=(1,))))
    if args.top_k < 0:
        raise ConfigError(str(Fault("--top-k", args.top_k, "must not be negative", legal=(0,))))
    if not (args.temperature >= 0 and math.isfinite(args.temperature)):
        raise ConfigError(
            str(Fault("--temperature", args.temperature, "must be a number, and not negative", legal=(0, 1)))
        )
    from titan_hydra.train.generate import generate

    draw = (args.max_tokens, args.temperature, args.top_k, args.seed)
    pieces = generate(checkpoint_of(args), beginning, ends, *draw, args.dtype)
    # `next` comes before the output, so that errors are raised before the prompt is printed
    print(shown, next(pieces), sep="", end="", flush=True)
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    return Exit.DONE
