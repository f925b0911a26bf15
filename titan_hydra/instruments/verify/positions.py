"""Rotary positions for reference.py, written only from the papers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from titan_hydra.core.job.config.model import Model


def rotate_pairs(x: Tensor, positions: Tensor, model: Any) -> Tensor:
    """Apply rotary positions to one head [batch, seq, width]: neighbouring dimensions form a complex number, which is
    rotated.
    """
    half = x.shape[-1] // 2
    angles = positions.double().unsqueeze(-1) * torch.tensor(
        [yarn_frequency(i, half, model) for i in range(half)], dtype=torch.float64
    )
    turned = torch.view_as_complex(x.unflatten(-1, (half, 2)).contiguous()) * torch.polar(
        torch.ones_like(angles), angles
    )
    return torch.view_as_real(turned).flatten(-2)


def yarn_frequency(i: int, half: int, model: Any) -> float:
    """Return the radians per position of the i-th pair with YaRN (arXiv 2309.00071, section 3.2). They are unscaled if
    the pair rotates more than `beta_fast` times over the original length, divided by the factor if it rotates fewer
    than `beta_slow` times, and interpolated linearly in between.
    """
    value, yarn = model.rope_theta ** (-i / half), model.yarn
    if yarn.factor == 1:
        return value
    # indices of the pairs that rotate beta_fast and beta_slow times
    fast, slow = (
        half * math.log(yarn.original_max_seq_len / (2 * math.pi * turns), model.rope_theta)
        for turns in (yarn.beta_fast, yarn.beta_slow)
    )
    fast, slow = max(math.floor(fast), 0), min(math.ceil(slow), 2 * half - 1)
    stretched = min(max((i - fast) / max(slow - fast, 1e-3), 0), 1)
    return value * (1 - stretched + stretched / yarn.factor)


def rotate_halves(x: Tensor, positions: Tensor, model: Model) -> Tensor:
    """Apply rotary positions (arXiv 2104.09864) to one head [batch, seq, width]; dimensions i and i + width / 2 are a
    pair.
    """
    half = x.shape[-1] // 2
    angles = positions.double().unsqueeze(-1) * torch.tensor(
        [frequency(i, half, model) for i in range(half)], dtype=torch.float64
    )
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)


def frequency(i: int, half: int, model: Model) -> float:
    """Return the radians per position of the i-th pair, with Llama 3.1's scaling of the low frequencies."""
    value, scaling = model.rope_theta ** (-i / half), getattr(model, "rope_scaling", None)
    length = 2 * math.pi / value
    if scaling is None or scaling.factor == 1 or length < scaling.original_max_seq_len / scaling.high_freq_factor:
        return value
    if length > scaling.original_max_seq_len / scaling.low_freq_factor:
        return value / scaling.factor
    smooth = (scaling.original_max_seq_len / length - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * value / scaling.factor + smooth * value
