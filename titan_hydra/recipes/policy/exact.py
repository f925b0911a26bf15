"""The losses of preferences and policies in float64, document by document, for cases against float64. Log-probabilities
and advantages of a document are read from the row of the file that has the document's tokens.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from titan_hydra.core.data.tokenizer import load
from titan_hydra.core.job.config.schema import Job
from titan_hydra.instruments.verify.reference import Routed, Weights, logs_of_labels
from titan_hydra.recipes.chat.exact import in_llama3_template


def preference(weights: Weights, batch: Weights, job: Job, routed: Routed) -> tuple[Tensor, int]:
    """Return the summed loss of the pairs in a batch, and their number (arXiv 2305.18290, equation 7)."""
    keys: Any = job.objective
    logs, losses = logs_of_labels(weights, batch, batch["labels"], job, routed), []
    words, known = load(job.tokenizer), {}
    for row in _rows(job):
        for side in ("chosen", "rejected"):
            text = in_llama3_template(
                [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row[side]}]
            )
            known[text] = row[f"ref_{side}_logps"]
    for log, tokens, documents, labels in zip(logs, batch["tokens"], batch["documents"], batch["labels"], strict=True):
        gains = []
        for document in range(int(documents.max()) + 1):
            inside = documents == document
            if (labels[inside] >= 0).any():  # a document without labels is padding
                text = words.decode(tokens[inside].tolist())
                number = next(value for full, value in known.items() if full.startswith(text))
                gains.append(log[inside].sum() - number)
        losses += [-logsigmoid(keys.beta * (gains[pair] - gains[pair + 1])) for pair in range(0, len(gains), 2)]
    return torch.stack(losses).sum(), len(losses)


def clipped(weights: Weights, batch: Weights, job: Job, routed: Routed) -> tuple[Tensor, int]:
    """Return the summed loss of the sampled tokens in a batch, and their number (arXiv 1707.06347, equation 7), with the
    upper clip of arXiv 2503.14476 and the divergence from a reference of arXiv 2402.03300, equation 4.
    """
    keys: Any = job.objective
    shape = batch["tokens"].shape
    labels, old, advantages, reference = (torch.full(shape, -1), *torch.zeros(3, *shape).double())
    rows = [row | {"advantages": _each(row)} for row in _rows(job)]
    for sample, (tokens, documents) in enumerate(zip(batch["tokens"], batch["documents"], strict=True)):
        for document in range(int(documents.max()) + 1):
            inside = (documents == document).nonzero().flatten().tolist()
            prefix = tokens[inside].tolist()
            row = next((row for row in rows if row["tokens"][: len(prefix)] == prefix), None)
            if row is None:
                continue  # padding
            prompt = len(row["tokens"]) - len(row["old_logprobs"])
            # logits at a token predict the next token; for a sample's last token, only the file's row has this next
            # token
            for number, at in enumerate(inside, start=1):
                if prompt <= number < len(row["tokens"]):
                    labels[sample, at] = row["tokens"][number]
                    old[sample, at] = row["old_logprobs"][number - prompt]
                    advantages[sample, at] = row["advantages"][number - prompt]
                    reference[sample, at] = row["ref_logprobs"][number - prompt] if keys.kl else 0
    logs = logs_of_labels(weights, batch, labels, job, routed)
    ratios = (logs - old).exp()
    bounded = ratios.clamp(min=1 - keys.clip).clamp(max=1 + (keys.clip_high or keys.clip))
    gains = torch.stack((ratios * advantages, bounded * advantages)).amin(0)
    if keys.kl:
        gains = gains - keys.kl * ((reference - logs).exp() - 1 - (reference - logs))
    return -gains[labels >= 0].sum(), int((labels >= 0).sum())


def _rows(job: Job) -> Iterator[dict[str, Any]]:
    source: Any = job.data  # the section of a source that reads files
    for line in Path(source.path).read_bytes().splitlines():
        yield json.loads(line)


def _each(row: dict[str, Any]) -> list[float]:
    advantages = row["advantages"]
    return advantages if isinstance(advantages, list) else [advantages] * len(row["old_logprobs"])
