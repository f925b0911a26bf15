"""Model families by the name in `model.family`. A new model is one file here and one row in `REGISTRY`.

A family is a class built as `Family(config, seq_len)` with `initial_distribution(fqn, config)`, which init.py uses to draw weights.
"""
from torch import nn

from titan_hydra.base.errors import ConfigError
from titan_hydra.config.schema import Model

from .llama3.model import Llama3

REGISTRY: dict[str, type[nn.Module]] = {"llama3": Llama3}


def build(config: Model, seq_len: int) -> nn.Module:
    """Build the model of `config` for sequences of up to `seq_len` tokens, on the current default device (use `with torch.device("meta")`).
    """
    if config.family not in REGISTRY:
        raise ConfigError(f"model.family={config.family}: no such model family; legal: {', '.join(REGISTRY)}")
    return REGISTRY[config.family](config, seq_len)
