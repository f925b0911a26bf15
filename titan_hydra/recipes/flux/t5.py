"""T5's encoder (arXiv 1910.10683, version 1.1): the embeddings of a caption's tokens. It is not trained here."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class T5(nn.Module):
    """Token ids [batch, tokens] to embeddings [batch, tokens, width]. Every token attends to all, padding included."""

    names = {
        "embedding": "shared",
        "norm": "encoder.final_layer_norm",
        "bias": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias",
        "blocks": "encoder.block",
        "attention_norm": "layer.0.layer_norm",
        "ffn_norm": "layer.1.layer_norm",
        **{f"w{letter}": f"layer.0.SelfAttention.{letter}" for letter in "qkvo"},
        "w1": "layer.1.DenseReluDense.wi_0",
        "w3": "layer.1.DenseReluDense.wi_1",
        "w2": "layer.1.DenseReluDense.wo",
    }

    def __init__(self, config: dict):
        super().__init__()
        self.buckets, self.reach = config["relative_attention_num_buckets"], config.get("relative_attention_max_distance", 128)
        self.embedding = nn.Embedding(config["vocab_size"], config["d_model"])
        self.bias = nn.Embedding(self.buckets, config["num_heads"])
        self.blocks = nn.ModuleList(T5Block(config) for _ in range(config["num_layers"]))
        self.norm = nn.RMSNorm(config["d_model"], eps=config["layer_norm_epsilon"])

    def forward(self, tokens: Tensor) -> Tensor:
        place = torch.arange(tokens.shape[1], device=tokens.device)
        bias = self.bias(bucket_of(place - place[:, None], self.buckets, self.reach)).permute(2, 0, 1).unsqueeze(0)
        h = self.embedding(tokens)
        for block in self.blocks:
            h = block(h, bias)
        return self.norm(h)


class T5Block(nn.Module):
    """Attention without scaling, with a relative position bias, then a gated feed-forward."""

    def __init__(self, config: dict):
        super().__init__()
        dim, width, hidden = config["d_model"], config["d_kv"] * config["num_heads"], config["d_ff"]
        self.heads = config["num_heads"]
        self.wq, self.wk, self.wv = (nn.Linear(dim, width, bias=False) for _ in "qkv")
        self.wo = nn.Linear(width, dim, bias=False)
        self.w1, self.w3 = (nn.Linear(dim, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(dim, eps=config["layer_norm_epsilon"]) for _ in range(2))

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.attention_norm(x)
        q, k, v = (linear(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.wq, self.wk, self.wv))
        h = F.scaled_dot_product_attention(q, k, v, bias.to(q.dtype), scale=1.0)
        x = x + self.wo(h.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(F.gelu(self.w1(h), approximate="tanh") * self.w3(h))


def bucket_of(offset: Tensor, buckets: int, reach: int) -> Tensor:
    """Return the bucket of each distance from a query to a key: half of the buckets are for keys after the query. In
    each half, the first half are single distances, the rest logarithmic ranges, the last from `reach` on.
    """
    half = buckets // 2
    single, far = half // 2, offset.abs()
    ratio = torch.log(far.clamp(min=1).float() / single) / math.log(reach / single)
    ranges = single + (ratio * (half - single)).long()
    return torch.where(far < single, far, ranges.clamp(max=half - 1)) + half * (offset > 0)
