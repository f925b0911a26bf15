"""The losses of preferences and policies in float64, document by document, for cases against float64."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .config import DirectPreference, PolicyGradient


def preference(logs: Tensor, batch: dict[str, Tensor], keys: DirectPreference) -> tuple[Tensor, int]:
    """Return the summed loss of the pairs in a batch, and their number (arXiv 2305.18290, equation 7)."""
    grown, losses = logs - batch["reference"].double(), []
    for gains, documents, labels in zip(grown, batch["documents"], batch["labels"], strict=True):
        for first in range(0, int(documents.max()) + 1, 2):
            chosen, rejected = documents == first, documents == first + 1
            if (labels[chosen | rejected] >= 0).any():
                losses.append(-logsigmoid(keys.beta * (gains[chosen].sum() - gains[rejected].sum())))
    return torch.stack(losses).sum(), len(losses)


def clipped(logs: Tensor, batch: dict[str, Tensor], keys: PolicyGradient) -> tuple[Tensor, int]:
    """Return the summed loss of the sampled tokens in a batch, and their number (arXiv 1707.06347, equation 7)."""
    counts = batch["labels"] >= 0
    ratios, advantages = (logs - batch["old_logprobs"].double()).exp()[counts], batch["advantages"].double()[counts]
    bounded = ratios.clamp(min=1 - keys.clip).clamp(max=1 + keys.clip)
    return -torch.stack((ratios * advantages, bounded * advantages)).amin(0).sum(), int(counts.sum())
