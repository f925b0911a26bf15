"""DeepSeek-V3 (arXiv 2412.19437): attention from latents, experts in all but the first blocks, and blocks that predict
tokens further ahead (MTP).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_hydra.core.models.layers import SDPA, Block, Decoder, rotate
from titan_hydra.core.models.moe import plain, set_experts

from .config import DeepSeekV3Config, Yarn

LATENT_EPS = 1e-6  # epsilon of the latents' norms, which in DeepSeek's code does not depend on rms_norm_eps


class DeepSeekV3(Decoder):
    """Token ids [batch, seq] to logits [batch, seq, vocab].

    With model.mtp, the blocks after the first n_layers predict further tokens, in training only: the logits of all
    predictions are then [(1 + mtp) * batch, seq, vocab], those of the next token first.
    """

    def __init__(self, config: DeepSeekV3Config, seq_len: int):
        super().__init__(config, seq_len)
        self.layers.update({str(config.n_layers + number): AheadBlock(config) for number in range(config.mtp)})
        for block in self.layers.values():
            block.attention = LatentAttention(config)
        set_experts(self.layers, config)

    def embed(self, tokens: Tensor, ahead: Tensor | None = None) -> Tensor:
        """Return the embeddings of tokens and, in training, those of the tokens 1 to mtp places `ahead` [batch, seq, mtp]
        of each, one after the other along the batch: the embedding is called once, as FSDP expects.
        """
        if ahead is not None and self.training:
            tokens = torch.cat((tokens, *ahead.unbind(-1)))
        return super().embed(tokens)

    def run(self, h: Tensor, rotary: Tensor, documents: Tensor | None) -> Tensor:
        """Apply the blocks and the last norm. In training with multi-token prediction, h also has the embeddings of
        later tokens, and the outputs of all predictions are returned, one behind the other in the batch.
        """
        if not self.config.mtp:
            return super().run(h, rotary, documents)
        main, further = self.config.n_layers, self.config.mtp if self.training else 0
        h, *embedded = h.chunk(1 + further)
        blocks = list(self.layers.values())
        for block in blocks[:main]:
            h = block(h, rotary, documents)
        outputs = [self.norm(h)]
        for block, embeddings in zip(blocks[main : main + further], embedded, strict=True):
            h, normed = block(h, rotary, documents, embeddings)
            outputs.append(normed)
        return torch.cat(outputs)

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        width = self.config.qk_rope_head_dim
        pairs = torch.arange(0, width, 2, device=device, dtype=torch.float32)
        return yarn_of(1.0 / self.config.rope_theta ** (pairs / width), self.config.rope_theta, self.config.yarn)


class AheadBlock(Block):
    """A block of multi-token prediction (arXiv 2412.19437, section 2.2): its input is a projection of the last block's
    output and of the embedding of a token further ahead. Embedding and head are those of the model.
    """

    def __init__(self, config: DeepSeekV3Config):
        super().__init__(config)
        self.enorm, self.hnorm, self.head_norm = (nn.RMSNorm(config.dim, eps=config.norm_eps) for _ in range(3))
        self.eh_proj = Joined(config.dim)

    def forward(  # type: ignore[override]  # only `DeepSeekV3.run` calls it
        self, x: Tensor, rotary: Tensor, documents: Tensor | None, embedded: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Run the layer on the outputs x of the block before and on embeddings, both [batch, seq, dim]. Return its output
        as it is and as the head takes it.
        """
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(x)), -1))
        y = super().forward(joined, rotary, documents)
        return y, self.head_norm(y)


class Joined(nn.Module):
    """A linear from two widths to one. It is not an nn.Linear, as number formats would convert it."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, 2 * dim))
        self.read = plain

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.read(self.weight))


class LatentAttention(nn.Module):
    """Causal attention whose keys and values are computed from a latent of each token (arXiv 2405.04434, section 2.1).

    One part of each query and key has no position (nope), the other is rotated (rope); all heads share the rotated part
    of the key.
    """

    query_scale = 1.0  # multiplies the queries (core/models/init.py)

    def __init__(self, config: DeepSeekV3Config):
        """Create the projections; queries too go through a latent if q_lora_rank is not 0."""
        super().__init__()
        self.config = config
        queries, rank = config.n_heads * config.head_width, config.kv_lora_rank
        if config.q_lora_rank:
            self.wq_a = nn.Linear(config.dim, config.q_lora_rank, bias=False)
            self.q_norm = nn.RMSNorm(config.q_lora_rank, eps=LATENT_EPS)
            self.wq_b = nn.Linear(config.q_lora_rank, queries, bias=False)
        else:
            self.wq = nn.Linear(config.dim, queries, bias=False)
        self.wkv_a = nn.Linear(config.dim, rank + config.qk_rope_head_dim, bias=False)
        self.kv_norm = nn.RMSNorm(rank, eps=LATENT_EPS)
        self.wkv_b = nn.Linear(rank, config.n_heads * (config.qk_nope_head_dim + config.v_head_dim), bias=False)
        self.wo = nn.Linear(config.n_heads * config.v_head_dim, config.dim, bias=False)
        # a module of its own, as under tensor parallelism each rank computes only a part of the shared key's gradient
        self.shared_key = nn.Identity()
        self.sdpa = SDPA(config.attention)

    def forward(self, x: Tensor, rotary: Tensor, documents: Tensor | None = None) -> Tensor:
        """Compute attention for x [batch, seq, dim]; `rotary` is the table of the rotated parts, `documents` as in
        SDPA.
        """
        config, (batch, seq, _) = self.config, x.shape
        # The number of heads is -1: under tensor parallelism the linears return only this rank's heads.
        q = (self.wq_b(self.q_norm(self.wq_a(x))) if config.q_lora_rank else self.wq(x)).view(
            batch, seq, -1, config.head_width
        )
        latent, shared = self.wkv_a(x).split((config.kv_lora_rank, config.qk_rope_head_dim), -1)
        kv = self.wkv_b(self.kv_norm(latent)).view(batch, seq, -1, config.qk_nope_head_dim + config.v_head_dim)
        k, v = kv.split((config.qk_nope_head_dim, config.v_head_dim), -1)
        shared = rotate(split_pairs(self.shared_key(shared).unsqueeze(2)), rotary).expand(-1, -1, q.shape[2], -1)
        plain, turned = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), -1)
        q = torch.cat((plain, rotate(split_pairs(turned), rotary)), -1) * (temperature(config.yarn) * self.query_scale)
        k = torch.cat((k, shared), -1)
        h = self.sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), documents)
        return self.wo(h.transpose(1, 2).reshape(batch, seq, -1))


def split_pairs(x: Tensor) -> Tensor:
    """Move the two members of each rotated pair, which are adjacent in DeepSeek's weights, to the two halves of a head."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def temperature(yarn: Yarn) -> float:
    """Return the factor of attention's logits under YaRN."""
    return (1 + 0.1 * yarn.temperature * math.log(yarn.factor)) ** 2


def yarn_of(frequencies: Tensor, theta: float, yarn: Yarn) -> Tensor:
    """Return radians per position with YaRN: low frequencies are divided by `factor`, and those between the bounds are
    interpolated by their index.
    """
    if yarn.factor == 1:
        return frequencies
    count = len(frequencies)

    def index(turns: float) -> float:
        """Return the index of the frequency that makes this number of rotations over the original length."""
        return count * math.log(yarn.original_max_seq_len / (turns * 2 * math.pi)) / math.log(theta)

    low, high = max(math.floor(index(yarn.beta_fast)), 0), min(math.ceil(index(yarn.beta_slow)), 2 * count - 1)
    stretch = ((torch.arange(count, device=frequencies.device) - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequencies * (1 - stretch) + frequencies / yarn.factor * stretch
