"""CLIP's text encoder (arXiv 2103.00020): one embedding of a whole caption. It is not trained here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS = {"quick_gelu": lambda x: x * torch.sigmoid(1.702 * x), "gelu": F.gelu}
OLD_END = 2  # the end-of-text id that configurations before transformers 4.30 name; the real end-of-text id is the largest


class Clip(nn.Module):
    """Token ids [batch, tokens] to the embedding [batch, width] at the end of each text."""

    names = {
        "embedding": "embeddings.token_embedding",
        "positions": "embeddings.position_embedding",
        "norm": "final_layer_norm",
        "blocks": "encoder.layers",
        "attention_norm": "layer_norm1",
        "ffn_norm": "layer_norm2",
        "wo": "self_attn.out_proj",
        **{f"w{letter}": f"self_attn.{letter}_proj" for letter in "qkv"},
        "w1": "mlp.fc1",
        "w2": "mlp.fc2",
    }

    def __init__(self, config: dict):
        super().__init__()
        dim, epsilon = config["hidden_size"], config["layer_norm_eps"]
        self.end = config["eos_token_id"]
        self.embedding = nn.Embedding(config["vocab_size"], dim)
        self.positions = nn.Embedding(config["max_position_embeddings"], dim)
        self.blocks = nn.ModuleList(ClipBlock(config) for _ in range(config["num_hidden_layers"]))
        self.norm = nn.LayerNorm(dim, eps=epsilon)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            h = block(h)
        ends = tokens.argmax(dim=1) if self.end == OLD_END else (tokens == self.end).int().argmax(dim=1)
        return self.norm(h)[torch.arange(len(h), device=h.device), ends]


class ClipBlock(nn.Module):
    """Causal attention, then a feed-forward."""

    def __init__(self, config: dict):
        super().__init__()
        dim, hidden, epsilon = config["hidden_size"], config["intermediate_size"], config["layer_norm_eps"]
        self.heads, self.activation = config["num_attention_heads"], ACTIVATIONS[config["hidden_act"]]
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim) for _ in "qkvo")
        self.w1, self.w2 = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.attention_norm, self.ffn_norm = (nn.LayerNorm(dim, eps=epsilon) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (linear(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.wq, self.wk, self.wv))
        x = x + self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.w2(self.activation(self.w1(self.ffn_norm(x))))
