"""Add a reference model's log-probability of each answer to pairs of answers, in one process."""
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from titan_hydra.base.errors import ConfigError
from titan_hydra.checkpoint.convert import read_model_config, read_template, read_tokenizer_config
from titan_hydra.config.files import write_text
from titan_hydra.data import tokenizer
from titan_hydra.data.chat import Turns
from titan_hydra.data.conversations import ConversationFiles, record_of
from titan_hydra.data.policy import REFERENCE, PairReader
from titan_hydra.data.shards import BadShards

from .generate import load_model


def score(checkpoint: Path, pairs: Path, out: Path, dtype: str) -> int:
    """Write the pairs of a file into another, with the columns REFERENCE. Returns their number. Raises ConfigError at a row that is no
    pair, or is longer than what the model reads; then nothing is written.
    """
    config = read_model_config(checkpoint)
    words = tokenizer.load(read_tokenizer_config(checkpoint))
    reader = PairReader(ConversationFiles([pairs], BadShards()), read_template(checkpoint), words, scored=False)
    rows = [reader.turns(number) for number in range(len(reader.lines))]
    longest = max((length for row in rows for length in row.documents), default=0)
    if not rows or longest > config.max_seq_len:
        reason = f"an answer with its question has {longest:,} tokens, more than model.max_seq_len={config.max_seq_len:,}"
        raise ConfigError(f"{pairs}: {reason if rows else 'no row in it'}")
    model = load_model(checkpoint, config, longest, dtype)
    lines = []
    for number, row in enumerate(rows):
        scores = dict(zip(REFERENCE, log_probabilities(model, row), strict=True))
        lines.append(json.dumps(record_of(reader.lines.row(number)[1]) | scores, ensure_ascii=False) + "\n")
    write_text(out, "".join(lines))
    return len(rows)


@torch.no_grad()
def log_probabilities(model: nn.Module, turns: Turns) -> list[float]:
    """Return the log-probability of what is to be learned in each document, from a forward of its own."""
    device = next(model.parameters()).device
    found, begin = [], 0
    for length in turns.documents:
        tokens = torch.from_numpy(turns.tokens[begin:begin + length]).long().to(device)
        trained = torch.from_numpy(turns.trained[begin:begin + length]).to(device)
        losses = F.cross_entropy(model(tokens[None, :-1])[0].float(), tokens[1:], reduction="none")
        found.append(-losses.double()[trained[1:]].sum().item())
        begin += length
    return found
