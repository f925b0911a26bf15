"""FLUX.1 on one device: a transformer over the tokens of an image and of its caption, which predicts the velocity of a
rectified flow.

The first blocks (double-stream) have separate weights for image and text, and one attention over both; in the other
blocks (single-stream) text and image are one sequence. Every block is modulated by one vector per sample: time, the
whole caption's embedding and, in distilled models, the strength of guidance. Each linear is also a linear in Hugging
Face's files, so weights need no permutation; image and text are separate in all names ("txt_" is the text's).
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_hydra.core.models.init import Normal
from titan_hydra.core.models.layers import SDPA

from .config import TIME, FluxConfig

EPSILON = 1e-6


class Flux(nn.Module):
    """Maps noisy latents [batch, tokens, patch_width] to their velocity, of the same shape."""

    def __init__(self, config: FluxConfig, seq_len: int):
        """Create the model. `guidance_in` is for models that are distilled from guidance; others have None."""
        super().__init__()
        self.config = config
        self.img_in = nn.Linear(config.patch_width, config.dim)
        self.txt_in = nn.Linear(config.text_dim, config.dim)
        self.time_in = Embedder(TIME, config.dim)
        self.vector_in = Embedder(config.pooled_dim, config.dim)
        self.guidance_in = Embedder(TIME, config.dim) if config.guidance is not None else None
        kinds = [DoubleBlock] * config.double_layers + [SingleBlock] * (config.n_layers - config.double_layers)
        self.layers = nn.ModuleDict({str(number): kind(config) for number, kind in enumerate(kinds)})
        self.modulation = Modulation(config.dim, 2)
        self.output = nn.Linear(config.dim, config.patch_width)

    def forward(
        self,
        latents: Tensor,
        text: Tensor,
        pooled: Tensor,
        time: Tensor,
        positions: Tensor,
        guidance: Tensor | None = None,
    ) -> Tensor:
        """Compute the velocity at `time` [batch], where 0 is the image and 1 the noise. `positions` [batch, tokens, 3]
        are the positions of the image's tokens; those of the text are all 0. `text` is [batch, tokens, text_dim],
        `pooled` [batch, pooled_dim], `guidance` [batch].
        """
        image, words = self.img_in(latents), self.txt_in(text)
        vector = self.time_in(waves(time).to(latents.dtype)) + self.vector_in(pooled)
        if self.guidance_in is not None:
            vector = vector + self.guidance_in(waves(guidance).to(latents.dtype))
        vector = F.silu(vector)
        origin = positions.new_zeros(*text.shape[:2], positions.shape[-1])
        rotary = angles(torch.cat((origin, positions), dim=1), self.config.rope_axes, self.config.rope_theta)
        for number, block in self.layers.items():
            if int(number) == self.config.double_layers:
                image = torch.cat((words, image), dim=1)
            if int(number) < self.config.double_layers:
                image, words = block(image, words, vector, rotary)
            else:
                image = block(image, vector, rotary)
        scale, shift = self.modulation(vector)
        return self.output(modulated(image[:, -latents.shape[1] :], shift, scale))

    @staticmethod
    def initial_distribution(fqn: str, config: FluxConfig) -> Normal | float:
        """Return the initial distribution of a parameter, or its constant. Modulations and the output begin at 0, so
        each block begins as the identity, and the velocity as 0 (adaLN-Zero, arXiv 2212.09748). Linears are normal with
        std 0.02.
        """
        *_, owner, leaf = fqn.split(".")
        if owner in ("q_norm", "k_norm"):
            return 1.0
        if leaf == "bias" or owner in ("modulation", "txt_modulation", "output"):
            return 0.0
        return Normal(0.02)


class Embedder(nn.Module):
    """Two linears with SiLU between them, which embed one of the inputs that modulate the blocks."""

    per_sample = True  # these linears get one row per sample, so number formats do not convert them

    def __init__(self, inputs: int, dim: int):
        super().__init__()
        self.w1, self.w2 = nn.Linear(inputs, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)))


class Modulation(nn.Linear):
    """Maps a vector to `parts` vectors [batch, 1, dim], which shift, scale and gate."""

    def __init__(self, dim: int, parts: int):
        super().__init__(dim, parts * dim)
        self.parts = parts

    def forward(self, vector: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(vector).unsqueeze(1).chunk(self.parts, dim=-1)


class Heads(nn.Module):
    """Queries, keys and values of a sequence, and the output after attention. Queries and keys are normalized over each
    head's width and rotated before text and image are joined, so that compiled code does all three in one pass.
    """

    def __init__(self, config: FluxConfig, output: bool = True):
        super().__init__()
        self.head_dim, inner = config.head_width, config.n_heads * config.head_width
        self.wq, self.wk, self.wv = (nn.Linear(config.dim, inner) for _ in "qkv")
        self.wo = nn.Linear(inner, config.dim) if output else None
        self.q_norm, self.k_norm = (nn.RMSNorm(self.head_dim, eps=EPSILON) for _ in "qk")

    def forward(self, x: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (linear(x).unflatten(-1, (-1, self.head_dim)) for linear in (self.wq, self.wk, self.wv))
        return turned(self.q_norm(q), rotary), turned(self.k_norm(k), rotary), v


class FluxAttention(nn.Module):
    """Attention of all tokens to all, on q, k, v [batch, tokens, heads, head_dim]."""

    def __init__(self, config: FluxConfig):
        super().__init__()
        self.sdpa = SDPA(config.attention, causal=False)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)).transpose(1, 2).flatten(2)


class Wide(nn.Module):
    """Feed-forward with GELU."""

    def __init__(self, config: FluxConfig):
        super().__init__()
        self.w1, self.w2 = nn.Linear(config.dim, config.ffn_width), nn.Linear(config.ffn_width, config.dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.gelu(self.w1(x), approximate="tanh"))


class DoubleBlock(nn.Module):
    """A double-stream block: separate weights for image and text, and one joint attention."""

    def __init__(self, config: FluxConfig):
        super().__init__()
        self.modulation, self.txt_modulation = (Modulation(config.dim, 6) for _ in range(2))
        self.heads, self.txt_heads = (Heads(config) for _ in range(2))
        self.feed_forward, self.txt_feed_forward = (Wide(config) for _ in range(2))
        self.attention = FluxAttention(config)

    def forward(self, image: Tensor, words: Tensor, vector: Tensor, rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Return image and text after joint attention and a feed-forward each. `vector` gives the modulation: shift,
        scale and gate before attention (0 to 2) and before the feed-forward (3 to 5).
        """
        ours, theirs = self.modulation(vector), self.txt_modulation(vector)
        lengths = words.shape[1], image.shape[1]
        first, then = rotary.split(lengths, dim=1)
        of_image, of_text = (
            self.heads(modulated(image, *ours[:2]), then),
            self.txt_heads(modulated(words, *theirs[:2]), first),
        )
        h = self.attention(*(torch.cat(pair, dim=1) for pair in zip(of_text, of_image, strict=True)))
        h_words, h_image = h.split(lengths, dim=1)
        image = image + ours[2] * self.heads.wo(h_image)
        words = words + theirs[2] * self.txt_heads.wo(h_words)
        image = image + ours[5] * self.feed_forward(modulated(image, *ours[3:5]))
        return image, words + theirs[5] * self.txt_feed_forward(modulated(words, *theirs[3:5]))


class SingleBlock(nn.Module):
    """A single-stream block: one sequence, text before image, with attention and feed-forward in parallel."""

    def __init__(self, config: FluxConfig):
        super().__init__()
        self.modulation = Modulation(config.dim, 3)
        self.heads = Heads(config, output=False)
        self.w1 = nn.Linear(config.dim, config.ffn_width)
        self.w2 = nn.Linear(config.n_heads * config.head_width + config.ffn_width, config.dim)
        self.attention = FluxAttention(config)

    def forward(self, x: Tensor, vector: Tensor, rotary: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(vector)
        h = modulated(x, shift, scale)
        wide = F.gelu(self.w1(h), approximate="tanh")
        return x + gate * self.w2(torch.cat((self.attention(*self.heads(h, rotary)), wide), dim=-1))


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Return x, normalized over its last dimension, scaled and shifted."""
    return F.layer_norm(x, x.shape[-1:], eps=EPSILON) * (1 + scale) + shift


def waves(time: Tensor) -> Tensor:
    """Return cosines and sines of 1000 * time [batch, TIME] in fp32, with frequencies from 1 down to 1e-4."""
    frequencies = torch.exp(
        -math.log(1e4) * torch.arange(TIME // 2, device=time.device, dtype=torch.float32) / (TIME // 2)
    )
    phases = 1000 * time.float()[:, None] * frequencies
    return torch.cat((phases.cos(), phases.sin()), dim=-1)


def angles(positions: Tensor, axes: tuple[int, ...], theta: float) -> Tensor:
    """Return cosines and sines [batch, tokens, 2, head_dim / 2] in fp32 of rotary positions over several
    coordinates.
    """
    parts = []
    for axis, width in enumerate(axes):
        frequencies = theta ** -(
            torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / max(width, 1)
        )
        parts.append(positions[..., axis, None].float() * frequencies)
    phases = torch.cat(parts, dim=-1)
    return torch.stack((phases.cos(), phases.sin()), dim=-2)


def turned(x: Tensor, rotary: Tensor) -> Tensor:
    """Rotate pairs of neighbouring elements of each head of x [batch, tokens, heads, head_dim], in fp32; returns the
    dtype of x.
    """
    cos, sin = rotary.unsqueeze(-3).unbind(-2)
    # cast before `stack`: compiled code may materialize the tensors that are stacked
    a, b = (part.float() for part in x.unflatten(-1, (-1, 2)).unbind(-1))
    return torch.stack([part.type_as(x) for part in (a * cos - b * sin, a * sin + b * cos)], dim=-1).flatten(-2)
