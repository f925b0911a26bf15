"""Llama 3 (arXiv 2407.21783, section 3.2) on one device, without knowledge of meshes, sharding or stages.

Parameters have the names of the paper's reference code, which survive any split: layers are in a ModuleDict, and a pipeline stage is this
model with layers deleted and `tok_embeddings`, `norm` or `output` set to None. Rotary positions pair the two halves of a head as Hugging
Face does, so weights need no permutation to or from its format.
"""
import math

import torch
from torch import Tensor, nn

from titan_hydra.config.schema import Model

from ..init import Normal
from ..layers import Block, TiedOutput, document_mask, document_positions


class Llama3(nn.Module):
    """Decoder-only transformer: token ids [batch, seq] to logits [batch, seq, vocab] in the compute dtype (the loss up-casts)."""

    def __init__(self, config: Model, seq_len: int):
        super().__init__()
        self.config, self.seq_len = config, seq_len
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        if config.tie_embeddings:
            self.output = TiedOutput(self.tok_embeddings)
        else:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("rotary", rotary_table(config, seq_len), persistent=False)

    def reset_buffers(self) -> None:
        """Recompute the rotary table, which is uninitialized after `to_empty`."""
        self.rotary.copy_(rotary_table(self.config, self.seq_len, self.rotary.device))

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Tensor | None = None, targets: Tensor | None = None,
    ) -> Tensor:
        """Compute logits, the hidden state (a stage without head) or the loss. Without an embedding, `tokens` is the hidden state [batch,
        seq, dim].

        `positions` [batch, seq] replace 0, 1, ... if the sequence is split or reordered. `documents` [batch, seq] are ids of packed
        documents: attention stays within one, and positions restart with each unless given. `targets` [batch, seq] are passed to an
        `output` that accepts them, which then returns the loss.
        """
        mask = None
        if documents is not None:
            mask = document_mask(documents)
            positions = document_positions(documents) if positions is None else positions
        rotary = self.rotary if positions is None else self.rotary[positions]  # once for all layers
        h = tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)
        for block in self.layers.values():
            h = block(h, rotary, mask)
        h = h if self.norm is None else self.norm(h)
        if self.output is None:
            return h
        return self.output(h) if targets is None else self.output(h, targets=targets)  # by name: hooks take only the first by place

    @staticmethod
    def initial_distribution(fqn: str, config: Model) -> Normal | float:
        """Return the initial distribution of a parameter, or its constant; TorchTitan's choices, which follow the paper's.

        Linears are normal with std 0.02 (TorchTitan truncates them at 100 sigma, which has no effect); the matrices that write to the
        residual stream, and w3, shrink with depth. A tied embedding starts as the head does: N(0, 1) would give huge logits.
        """
        head = Normal(config.dim**-0.5, cut=3.0)
        if "norm" in fqn:
            return 1.0
        if fqn.startswith("tok_embeddings."):
            return head if config.tie_embeddings else Normal(1.0)
        if fqn.startswith("output."):
            return head
        _, layer, _, matrix, _ = fqn.split(".")
        return Normal(0.02 / math.sqrt(2 * (int(layer) + 1))) if matrix in ("wo", "w2", "w3") else Normal(0.02)


def rotary_table(config: Model, seq_len: int, device: torch.device | None = None) -> Tensor:
    """Return cosines and sines [seq_len, 2, head_dim / 2] in fp32."""
    angles = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), rotary_frequencies(config, device))
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotary_frequencies(config: Model, device: torch.device | None = None) -> Tensor:
    """Return radians per position [head_dim / 2], the low frequencies stretched as in Llama 3.1.

    Wavelengths below original_max_seq_len / high_freq_factor stay, those above original_max_seq_len / low_freq_factor grow by `factor`, and
    those between are interpolated linearly in their number of turns over the original length.
    """
    head_dim, scaling = config.dim // config.n_heads, config.rope_scaling
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    if scaling.factor == 1:
        return frequencies
    turns = scaling.original_max_seq_len * frequencies / (2 * math.pi)
    keep = ((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / scaling.factor)
