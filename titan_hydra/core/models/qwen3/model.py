"""Qwen3 (arXiv 2505.09388): the decoder whose queries and keys are normalized, so that attention's logits stay small
without biases.
"""

from titan_hydra.core.models.layers import Decoder


class Qwen3(Decoder):
    """Token ids [batch, seq] to logits [batch, seq, vocab]."""
