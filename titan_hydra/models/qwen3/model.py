"""Qwen3 (arXiv 2505.09388): the decoder whose queries and keys are normalized, so that attention's logits stay small without biases."""
from titan_hydra.config.schema import Model

from ..layers import Decoder


class Qwen3(Decoder):
    """Token ids [batch, seq] to logits [batch, seq, vocab]."""

    def __init__(self, config: Model, seq_len: int):
        super().__init__(config, seq_len, qk_norm=True)
