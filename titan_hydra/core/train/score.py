"""Log-probabilities of given texts under the model of a run or export, in one process."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.opened import open_model
from titan_hydra.core.data.files import texts

from .generate import load_model

# number of texts that are sorted by length at a time, so that the texts of a forward are about equally long
TOGETHER = 1000
LOGITS = 2**28  # maximum number of logits in a forward, unless a single text needs more


def score_texts(
    model_path: Path, file: Path, text_key: str, context: int | None, dtype: str, tokenizer_file: Path | None = None
) -> Iterator[dict[str, float]]:
    """Yield for each text of a file: the number of its row (from 1), the negative log-probability in nats of its tokens
    and of the end-of-text after them, and the number of these tokens. `model_path` is a run, a checkpoint or an export;
    `tokenizer_file` its tokenizer's file, if the user has named one.

    A text of more than `context` tokens (default: the run's data.seq_len, or an export's model.max_seq_len) is scored
    in windows of that length. Each window begins in the middle of the previous one, so that a token is predicted from
    at least half a context. Raises ConfigError for a file without text, or with a row that cannot be read.
    """
    opened = open_model(model_path, tokenizer_file)
    config, tokenizer = opened.config, opened.tokenizer
    context = context or opened.seq_len or config.max_seq_len
    if context > config.max_seq_len:
        raise ConfigError(f"--context={context}: is more than model.max_seq_len; nearest legal: {config.max_seq_len}")
    # as in training, a text without begin-of-text follows the end-of-text of the previous document
    before = [tokenizer.eos_id] if tokenizer.bos_id is None else []
    rows = ((row, before + tokenizer.document(text)) for row, text in texts(file, text_key))
    model = None
    while some := list(islice(rows, TOGETHER)):
        model = model or load_model(opened.reader, config, context, dtype)
        nats = _score([np.array(ids) for _, ids in some], model, context, LOGITS // config.vocab_size)
        yield from (
            {"row": row, "nats": total, "tokens": len(ids) - 1} for (row, ids), total in zip(some, nats, strict=True)
        )
    if model is None:
        raise ConfigError(f"{file}: no text in it")


class TextWindow(NamedTuple):
    """A part of a row that one forward sees. The losses of its tokens from `first` on count."""

    row: int
    tokens: np.ndarray
    first: int


def _score(rows: list[np.ndarray], model: nn.Module, context: int, room: int) -> list[float]:
    """Return the sum of the losses of each row. Windows of about the same length share a forward, which takes at most
    `room` tokens, or one window.
    """
    waiting = [
        TextWindow(number, row[begin:end], first - begin)
        for number, row in enumerate(rows)
        for begin, first, end in windows(len(row), context)
    ]
    waiting.sort(key=lambda window: -len(window.tokens))
    totals = [0.0] * len(rows)
    while waiting:
        longest = len(waiting[0].tokens)
        count = max(room // longest, 1)
        batch, waiting = waiting[:count], waiting[count:]
        # later tokens do not change a token's loss, so padding does not either
        padded = np.stack([np.pad(window.tokens, (0, longest - len(window.tokens))) for window in batch])
        for window, losses in zip(batch, token_losses(model, torch.from_numpy(padded)), strict=True):
            totals[window.row] += losses[window.first - 1 : len(window.tokens) - 1].sum().item()
    return totals


def windows(length: int, context: int) -> Iterator[tuple[int, int, int]]:
    """Yield for each window of a row: where it begins, the first token whose loss counts in this window, and where it
    ends. Each token except the row's first counts in exactly one window. The model sees at most `context` tokens at
    once.
    """
    begin, first = 0, 1
    while first < length:
        end = min(begin + context + 1, length)
        yield begin, first, end
        begin, first = end - 1 - context // 2, end


@torch.no_grad()
def token_losses(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the loss of each token [batch, n] except the first, given the tokens before it: [batch, n - 1], float64 on
    the host.
    """
    tokens = tokens.long().to(next(model.parameters()).device)
    return (
        F.cross_entropy(model(tokens[:, :-1]).float().transpose(1, 2), tokens[:, 1:], reduction="none").double().cpu()
    )
