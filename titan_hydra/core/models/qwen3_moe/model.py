"""Qwen3 with experts (arXiv 2505.09388): Qwen3's attention, and a feed-forward of experts in each block."""

from titan_hydra.core.models.layers import Decoder
from titan_hydra.core.models.moe import set_experts
from titan_hydra.core.models.sparse import SparseModel


class Qwen3Moe(Decoder):
    """Token ids [batch, seq] to logits [batch, seq, vocab]."""

    def __init__(self, config: SparseModel, seq_len: int):
        super().__init__(config, seq_len)
        set_experts(self.layers, config)
