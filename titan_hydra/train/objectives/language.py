"""Loss functions: a sum over tokens, so that the trainer can divide once by the tokens of the whole global batch."""
from __future__ import annotations

import torch
import torch.nn.functional as F

from titan_hydra.data.batch import IGNORED


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of logits [batch, seq, vocab] for labels [batch, seq]; computed in float32 whatever the logits are."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), ignore_index=IGNORED, reduction="sum")


def already_summed(loss: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the loss unchanged: the head has computed it from the targets (parallel/loss_head.py)."""
    return loss


LOSSES = {"cross_entropy": cross_entropy, "linear_cross_entropy": already_summed}
TARGETS_IN_FORWARD = ("linear_cross_entropy",)  # the model's forward takes the labels too, and returns the loss
