"""Log-probabilities of the answers of pairs, and of the tokens of rollouts, under the model of a run, in one process."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.opened import Opened, open_model
from titan_hydra.core.data.files import record_of
from titan_hydra.core.data.records import Records
from titan_hydra.core.data.shards import BadRow, BadShards
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.train.generate import load_model
from titan_hydra.core.train.score import token_losses
from titan_hydra.recipes.chat.rows import Turns
from titan_hydra.recipes.chat.template_of_run import template_of_facts

from .rows import REFERENCE, PairReader, RolloutReader


def score_pairs(
    model_path: Path,
    pairs: Path,
    out: Path,
    dtype: str,
    tokenizer_file: Path | None = None,
    bad: BadShards | None = None,
) -> int:
    """Copy the pairs of a file into another file, with the columns REFERENCE added. Return the number of pairs. A row
    that is not a pair is left out if `bad` allows that. Raises ConfigError, and writes nothing, for more such rows, or
    one that is longer than the model's sequence length.
    """
    opened, bad = open_model(model_path, tokenizer_file), bad or BadShards()
    reader = PairReader(Records([pairs], bad), template_of_facts(opened.facts), opened.tokenizer, scored=False)

    def scored(model: nn.Module, row: Turns) -> dict[str, Any]:
        sums = [answer.sum().item() for answer in log_probabilities(model, row)]
        return dict(zip(REFERENCE, sums, strict=True))

    return _score_rows(opened, reader, pairs, out, dtype, bad, scored)


def score_rollouts(
    model_path: Path,
    rollouts: Path,
    out: Path,
    column: str,
    dtype: str,
    tokenizer_file: Path | None = None,
    bad: BadShards | None = None,
) -> int:
    """Copy the rollouts of a file into another file, with the log-probability of each sampled token in `column`. Return
    the number of rollouts. Errors are those of `score_pairs`.
    """
    opened, bad = open_model(model_path, tokenizer_file), bad or BadShards()
    reader = RolloutReader(Records([rollouts], bad), opened.tokenizer, opened.config.vocab_size, ("old_logprobs",))

    def scored(model: nn.Module, row: Turns) -> dict[str, Any]:
        (of_tokens,) = log_probabilities(model, row)
        return {column: of_tokens.tolist()}

    return _score_rows(opened, reader, rollouts, out, dtype, bad, scored)


def _score_rows(
    opened: Opened,
    reader: PairReader | RolloutReader,
    file: Path,
    out: Path,
    dtype: str,
    bad: BadShards,
    scored: Callable[[nn.Module, Turns], dict[str, Any]],
) -> int:
    """Write the rows of a file with the columns that `scored` returns for each."""
    config, rows = opened.config, dict[int, Turns]()
    for number in range(len(reader.lines)):
        try:
            rows[number] = reader.turns(number)
        except BadRow as error:
            bad.add(error)
    longest = max((length for row in rows.values() for length in lengths(row)), default=0)
    if not rows or longest > config.max_seq_len:
        reason = (
            f"an answer with its question has {longest:,} tokens, more than model.max_seq_len={config.max_seq_len:,}"
        )
        raise ConfigError(f"{file}: {reason if rows else 'no row in it'}")
    model = load_model(opened.reader, config, longest, dtype)
    lines = []
    for number, row in rows.items():
        whole = record_of(reader.lines.row(number)[1]) | scored(model, row)
        lines.append(json.dumps(whole, ensure_ascii=False, default=str) + "\n")
    try:
        write_text(out, "".join(lines))
    except OSError as error:
        raise ConfigError(f"--out={out}: {error.strerror}") from error
    return len(rows)


def lengths(turns: Turns) -> tuple[int, ...]:
    """Return the lengths of the documents of a row."""
    return turns.documents or (len(turns.tokens),)


def log_probabilities(model: nn.Module, turns: Turns) -> list[Tensor]:
    """Return the log-probability of each learned token, by document, one forward per document."""
    by_document, begin = [], 0
    for length in lengths(turns):
        losses = token_losses(model, torch.from_numpy(turns.tokens[None, begin : begin + length]))[0]
        by_document.append(-losses[torch.from_numpy(turns.trained[begin + 1 : begin + length])])
        begin += length
    return by_document
