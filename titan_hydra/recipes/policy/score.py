"""Log-probabilities of the answers of pairs under the model of a run, in one process."""

import json
from pathlib import Path

import torch
from torch import nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.opened import open_model
from titan_hydra.core.data.files import record_of
from titan_hydra.core.data.records import Records
from titan_hydra.core.data.shards import BadRow, BadShards
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.train.generate import load_model
from titan_hydra.core.train.score import token_losses
from titan_hydra.recipes.chat.rows import Turns
from titan_hydra.recipes.chat.template_of_run import template_of_facts

from .rows import REFERENCE, PairReader


def score_pairs(
    place: Path, pairs: Path, out: Path, dtype: str, tokenizer_file: Path | None = None, bad: BadShards | None = None
) -> int:
    """Copy the pairs of a file into another file, with the columns REFERENCE added. Return the number of pairs. A row
    that is not a pair is left out if `bad` allows that. Raises ConfigError, and writes nothing, for more such rows, or
    one that is longer than the model's sequence length.
    """
    opened = open_model(place, tokenizer_file)
    config, template = opened.config, template_of_facts(opened.facts)
    bad = bad or BadShards()
    reader = PairReader(Records([pairs], bad), template, opened.words, scored=False)
    rows = dict[int, Turns]()
    for number in range(len(reader.lines)):
        try:
            rows[number] = reader.turns(number)
        except BadRow as error:
            bad.add(error)
    longest = max((length for row in rows.values() for length in row.documents), default=0)
    if not rows or longest > config.max_seq_len:
        reason = (
            f"an answer with its question has {longest:,} tokens, more than model.max_seq_len={config.max_seq_len:,}"
        )
        raise ConfigError(f"{pairs}: {reason if rows else 'no row in it'}")
    model = load_model(opened.reader, config, longest, dtype)
    lines = []
    for number, row in rows.items():
        scores = dict(zip(REFERENCE, log_probabilities(model, row), strict=True))
        lines.append(
            json.dumps(record_of(reader.lines.row(number)[1]) | scores, ensure_ascii=False, default=str) + "\n"
        )
    write_text(out, "".join(lines))
    return len(rows)


def log_probabilities(model: nn.Module, turns: Turns) -> list[float]:
    """Return the log-probability of the learned tokens of each document, one forward per document."""
    found, begin = [], 0
    for length in turns.documents:
        losses = token_losses(model, torch.from_numpy(turns.tokens[None, begin : begin + length]))[0]
        found.append(-losses[torch.from_numpy(turns.trained[begin + 1 : begin + length])].sum().item())
        begin += length
    return found
