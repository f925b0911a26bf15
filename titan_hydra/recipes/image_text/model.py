"""A vision tower of Siglip2's kind (arXiv 2502.14786) before a decoder: an image keeps its aspect ratio, and each of
its patches is a token.

The tower takes a fixed number of patches for each sample, those of all its images one after another, so that all shapes
are the same whatever the images are. A sample without images has empty patches: the tower still runs on every rank, as
all ranks must take part in its collectives.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_hydra.core.job.config.model import Model
from titan_hydra.core.models.init import Normal
from titan_hydra.core.models.layers import SDPA, Decoder
from titan_hydra.core.models.llama3.model import Llama3
from titan_hydra.core.models.qwen3.model import Qwen3

from .config import Llama3VisionConfig, Qwen3VisionConfig, Vision

EPS = 1e-6  # epsilon of the tower's norms


class WithVision(Decoder):
    """A decoder in which a vision tower computes the embeddings of images' tokens. Batches have the tensors of
    `Tower.forward` in addition to those of the text.
    """

    def __init__(self, config: Llama3VisionConfig | Qwen3VisionConfig, seq_len: int):
        super().__init__(config, seq_len)
        self.vision = Tower(config.vision, config.dim)

    def embed(self, tokens: Tensor, **images: Tensor) -> Tensor:
        h = super().embed(tokens)
        return h if self.vision is None else self.vision(h, **images)

    @staticmethod
    def initial_distribution(fqn: str, config: Model) -> Normal | float:
        if not fqn.startswith("vision."):
            return Decoder.initial_distribution(fqn, config)
        if fqn.endswith(".bias"):
            return 0.0
        return 1.0 if "norm" in fqn else Normal(0.02)


class Llama3Vision(WithVision, Llama3):
    """Token ids [batch, seq] and images to logits [batch, seq, vocab]."""


class Qwen3Vision(WithVision, Qwen3):
    """Token ids [batch, seq] and images to logits [batch, seq, vocab]."""


class Tower(nn.Module):
    """Replaces the embeddings at images' tokens by the features of their patches."""

    def __init__(self, config: Vision, dim: int):
        """Create the tower. Its output has the width `dim` of the decoder."""
        super().__init__()
        self.grid = config.grid
        self.patches = nn.Linear(3 * config.patch**2, config.dim)
        self.positions = nn.Linear(config.grid**2, config.dim, bias=False)
        self.blocks = nn.ModuleList(TowerBlock(config) for _ in range(config.n_layers))
        self.norm = nn.LayerNorm(config.dim, eps=EPS)
        self.inner, self.outer = nn.Linear(config.dim, config.ffn_dim), nn.Linear(config.ffn_dim, dim)

    def forward(self, h: Tensor, patches: Tensor, cells: Tensor, images: Tensor, places: Tensor) -> Tensor:
        """Return h [batch, seq, dim] with each image token's embedding replaced by the tower's output for its patch.

        `patches` [batch, patches, 3 * patch**2] are bytes. `cells` [batch, patches, 4] are for each patch its row and
        column, and the numbers of rows and columns of its image. `images` [batch, patches] are for each patch the
        number of its image within the sample, -1 for an empty patch. `places` [batch, seq] are for each token the
        number of its patch, -1 for a token of text.
        """
        x = self.patches((patches.float() / 127.5 - 1).type_as(h)) + self.positions(self.mixture(cells).type_as(h))
        mask = (images.unsqueeze(2) == images.unsqueeze(1)).unsqueeze(1)
        for block in self.blocks:
            x = block(x, mask)
        x = self.outer(F.gelu(self.inner(self.norm(x)), approximate="tanh"))
        chosen = x.gather(1, places.clamp(min=0).unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return torch.where((places >= 0).unsqueeze(-1), chosen.type_as(h), h)

    def mixture(self, cells: Tensor) -> Tensor:
        """Return weights [batch, patches, grid**2]: a patch's position is the sum of the learned positions with these
        weights. This resizes the table of positions to the image's rows and columns.
        """
        row, column, rows, columns = cells.unbind(-1)
        return (
            resized(row, rows, self.grid).unsqueeze(-1) * resized(column, columns, self.grid).unsqueeze(-2)
        ).flatten(2)


def resized(index: Tensor, number: Tensor, size: int) -> Tensor:
    """Return the weights [..., size] with which `size` points are interpolated at point `index` of `number`: a triangle
    filter, as in F.interpolate with antialias=True.
    """
    step = size / number.clamp(min=1).float()
    centre = (index + 0.5) * step
    distance = torch.arange(size, device=index.device) + 0.5 - centre.unsqueeze(-1)
    weights = (1 - distance.abs() / step.clamp(min=1).unsqueeze(-1)).clamp(min=0)
    return weights / weights.sum(-1, keepdim=True)


class TowerBlock(nn.Module):
    """Attention within each image, then a feed-forward, each after a LayerNorm and added to the stream."""

    def __init__(self, config: Vision):
        """Create a block; attention is not causal."""
        super().__init__()
        self.heads, self.sdpa = config.n_heads, SDPA("auto", causal=False)
        self.attention_norm, self.ffn_norm = (nn.LayerNorm(config.dim, eps=EPS) for _ in range(2))
        # Keys have no bias: it would add the same number to all scores of a query, which softmax ignores.
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(config.dim, config.dim, bias=name != "wk") for name in ("wq", "wk", "wv", "wo")
        )
        self.w1, self.w2 = nn.Linear(config.dim, config.ffn_dim), nn.Linear(config.ffn_dim, config.dim)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Run the block on x [batch, patches, dim]; `mask` [batch, 1, patches, patches] is True within an image."""
        y = self.attention_norm(x)
        q, k, v = (linear(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.wq, self.wk, self.wv))
        x = x + self.wo(self.sdpa(q, k, v, mask).transpose(1, 2).flatten(2))
        return x + self.w2(F.gelu(self.w1(self.ffn_norm(x)), approximate="tanh"))
