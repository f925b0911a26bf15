"""Llama 3 (arXiv 2407.21783, section 3.2): the decoder with the low rotary frequencies stretched as in Llama 3.1."""

import math

import torch
from torch import Tensor

from titan_hydra.core.models.layers import Decoder

from .config import RopeScaling


class Llama3(Decoder):
    """Token ids [batch, seq] to logits [batch, seq, vocab]."""

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        return stretched(super().frequencies(device), self.config.rope_scaling)


def stretched(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Return radians per position, the low frequencies stretched.

    Wavelengths below original_max_seq_len / high_freq_factor are not changed. Wavelengths above original_max_seq_len /
    low_freq_factor are multiplied by `factor`. Between the two limits, the frequency is interpolated linearly by the
    number of rotations over the original length.
    """
    if scaling.factor == 1:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)
