"""Qwen3 with experts (arXiv 2505.09388): Qwen3's attention, and a feed-forward of experts in each block."""

from ..layers import Decoder
from ..moe import set_experts
from ..sparse import SparseModel


class Qwen3Moe(Decoder):
    """Token ids [batch, seq] to logits [batch, seq, vocab]."""

    def __init__(self, config: SparseModel, seq_len: int):
        super().__init__(config, seq_len)
        set_experts(self.layers, config)
