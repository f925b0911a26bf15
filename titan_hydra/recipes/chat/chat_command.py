"""`titan generate chat`: answer a question with the model of a run or checkpoint."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from titan_hydra.experiments.runs.command_generate import add_options, print_continuation

if TYPE_CHECKING:
    from titan_hydra.core.checkpoint.opened import Opened


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_options(parser)
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="the question; the run's chat template is applied to it"
    )


def main(args: argparse.Namespace) -> int:
    """Print the answer, token by token. The answer ends where the model's answers end; special tokens are not printed."""

    def question(opened: Opened) -> list[int]:
        from .template_of_run import template_of_facts

        asked = template_of_facts(opened.facts).prompt([{"role": "user", "content": args.prompt}])
        return opened.tokenizer.locate(asked).ids

    return print_continuation(args, question, special=False)
