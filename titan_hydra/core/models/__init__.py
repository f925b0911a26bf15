"""Model families, a folder each: config.py (its keys, no torch), model.py (the module on one device), sharding.py (how
tensor parallelism splits it), hf.py (Hugging Face's names). What families share is in layers.py, init.py and hf.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_hydra.core.job.config.family import Family, decoder_flops, decoder_modules, decoder_parameters, family_of
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.registry import register
from titan_hydra.core.job.config.schema import key

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "Family",
    "Model",
    "build",
    "decoder_flops",
    "decoder_modules",
    "decoder_parameters",
    "family_of",
    "key",
    "register",
]


def build(config: Model, seq_len: int) -> nn.Module:
    """Build the model of `config` for sequences of up to `seq_len` tokens, on the current default device (use `with
    torch.device("meta")`). Raises ConfigError if its family is not registered.
    """
    return family_of(config).part("model")(config, seq_len)
