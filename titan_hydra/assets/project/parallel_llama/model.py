"""Llama 3 whose blocks run attention and feed-forward side by side, as in GPT-J and PaLM."""

from titan_hydra.extend import Block, Llama3


class ParallelBlock(Block):
    def forward(self, x, rotary, documents=None):
        h = self.attention_norm(x)
        return x + self.attention(h, rotary, documents) + self.feed_forward(self.ffn_norm(x))


class ParallelLlama(Llama3):
    def __init__(self, config, seq_len):
        super().__init__(config, seq_len)
        for block in self.layers.values():
            block.__class__ = ParallelBlock
