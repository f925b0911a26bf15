"""The keys of Llama 3 in addition to the keys that every family has. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.ranges import COUNT, POSITIVE, WIDTH, Interval


@dataclass
class RopeScaling:
    factor: float = key(
        8.0, "factor that stretches low frequencies (Llama 3.1: 8, Llama 3.2: 32); 1 turns scaling off", Interval(1)
    )
    low_freq_factor: float = key(
        1.0, "wavelengths above original_max_seq_len / low_freq_factor are stretched fully", POSITIVE
    )
    high_freq_factor: float = key(
        4.0, "wavelengths below original_max_seq_len / high_freq_factor are not changed", POSITIVE
    )
    original_max_seq_len: int = key(
        8192, "sequence length of pre-training, before rotary frequencies were stretched", COUNT
    )


@dataclass
class Llama3Config(Model):
    ffn_dim_multiplier: float = key(
        1.0, "multiplies the feed-forward width 8/3 * dim", Interval(0, 1000, open_low=True)
    )
    multiple_of: int = key(256, "the feed-forward width is rounded up to a multiple of this", WIDTH)
    rope_scaling: RopeScaling = key(
        RopeScaling, "Llama 3.1's way to stretch low rotary frequencies for longer sequences"
    )

    @property
    def ffn_width(self) -> int:
        """The width of the feed-forward: ffn_dim or 8/3 of dim, times ffn_dim_multiplier, rounded up to a multiple of
        multiple_of.
        """
        width = int(self.ffn_dim_multiplier * int(8 * self.dim / 3))
        return self.ffn_dim or -(-width // self.multiple_of) * self.multiple_of

    def arithmetic(self) -> dict[str, Any]:
        scaling = self.rope_scaling if self.rope_scaling.factor != 1 else None
        return super().arithmetic() | {"ffn_dim_multiplier": None, "multiple_of": None, "rope_scaling": scaling}

    def faults(self) -> Iterator[Fault]:
        """Llama 3.1 divides low frequencies by a factor, keeps high ones, and interpolates between two bounds, which must be
        in order. A multiplier near 0 would round the feed-forward's width to 0.
        """
        scaling = self.rope_scaling
        if scaling.factor != 1 and scaling.low_freq_factor >= scaling.high_freq_factor:
            yield Fault(
                "model.rope_scaling.low_freq_factor",
                scaling.low_freq_factor,
                f"must be less than model.rope_scaling.high_freq_factor={scaling.high_freq_factor}",
            )
        if self.ffn_width < 1:
            yield Fault("model.ffn_dim_multiplier", self.ffn_dim_multiplier, "leaves no feed-forward")
