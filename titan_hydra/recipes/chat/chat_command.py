"""`titan chat`: answer a question with the model of a run or checkpoint."""

import argparse
from pathlib import Path

from titan_hydra.commands.generate import add_options, print_continuation
from titan_hydra.data.tokenizer import Tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="the question; the run's chat template is applied to it"
    )


def main(args: argparse.Namespace) -> int:
    """Print the answer, token by token. The answer ends at the first special token."""

    def question(checkpoint: Path, tokenizer: Tokenizer) -> list[int]:
        from .template_of_run import read_template

        return tokenizer.locate(read_template(checkpoint).prompt([{"role": "user", "content": args.prompt}])).ids

    return print_continuation(args, question, lambda tokenizer: {tokenizer.eos_id, *tokenizer.special.values()})
