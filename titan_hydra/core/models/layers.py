"""A decoder-only transformer and its layers: attention, feed-forward, a tied head, rotary positions, packed documents.

They run on one device, without meshes, sharding or stages. Parameters have the names of Llama's reference code, and any
split keeps these names: layers are in a ModuleDict, and a pipeline stage is the model with some layers deleted and
`tok_embeddings`, `norm` or `output` set to None. A rotary pair consists of one element of each half of a head, as at
Hugging Face, so conversion does not permute weights.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_hydra.core.job.config.attention import Call, takes_offsets
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.kernels.attention import DTYPES, SDPA
from titan_hydra.core.kernels.documents import document_mask, document_offsets

from .init import Normal


class Decoder(nn.Module):
    """Decoder-only transformer: token ids [batch, seq] to logits [batch, seq, vocab] in the compute dtype. (The loss
    casts them to float32.)
    """

    output_scale = 1.0  # multiplies the head's input (core/models/init.py)

    def __init__(self, config: Model, seq_len: int):
        """Create a model for sequences of `seq_len` tokens; the names of its modules are those of its checkpoints."""
        super().__init__()
        self.config, self.seq_len = config, seq_len
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        if config.tie_embeddings:
            self.output: nn.Module = TiedOutput(self.tok_embeddings)
        else:
            self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.register_buffer("rotary", self.rotary_table(), persistent=False)

    def rotary_table(self, device: torch.device | None = None) -> Tensor:
        """Return cosines and sines [seq_len, 2, head_width / 2] in fp32."""
        angles = torch.outer(torch.arange(self.seq_len, device=device, dtype=torch.float32), self.frequencies(device))
        return torch.stack((angles.cos(), angles.sin()), dim=1)

    def frequencies(self, device: torch.device | None = None) -> Tensor:
        """Return the radians per position of each pair [head_width / 2]."""
        width = self.config.head_width
        return 1.0 / self.config.rope_theta ** (torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)

    def reset_buffers(self) -> None:
        """Recompute the rotary table, which is uninitialized after `to_empty`."""
        rotary: Any = self.rotary
        rotary.copy_(self.rotary_table(rotary.device))

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        ends: Tensor | None = None,
        targets: Tensor | None = None,
        **own: Tensor,
    ) -> Tensor:
        """Compute logits, the hidden state (a stage without head) or the loss. Without an embedding, `tokens` is the
        hidden state [batch, seq, dim].

        `positions` [batch, seq] replace 0, 1, ... if the sequence is split or reordered, or has packed documents. `ends`
        [batch, n] (int32) are the ends of a sample's documents (the last one repeated); attention then stays within a
        document. `targets` [batch, seq] are passed to an `output` that accepts them, which then returns the loss.
        Families with further inputs override `embed`.
        """
        rotary: Any = self.rotary if positions is None else self.rotary[positions]  # computed once for all layers
        h = self.embed(tokens, **own)
        documents = None if ends is None else self.documents(ends, h)
        h = self.run(h, rotary, documents)
        if self.output is None:
            return h
        h = scaled_by(self.output_scale, h)
        # arguments are passed by name, as hooks get only the first positional argument
        return self.output(h) if targets is None else self.output(h, targets=targets)

    def run(self, h: Tensor, rotary: Tensor, documents: Tensor | None) -> Tensor:
        """Run the blocks and the norm after them."""
        for block in self.layers.values():
            h = block(h, rotary, documents)
        return h if self.norm is None else self.norm(h)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first block: the embedding of token ids, or, in a later stage, the hidden state
        itself.
        """
        return tokens if self.tok_embeddings is None else self.tok_embeddings(tokens)

    def documents(self, ends: Tensor, h: Tensor) -> Tensor:
        """Return the offsets of documents or, for an attention kernel that takes no offsets, a mask of all pairs. The
        result serves all layers.
        """
        call = Call(h.device.type, DTYPES[h.dtype], self.config.head_width)
        return (
            document_offsets(ends) if takes_offsets(self.config.attention, call) else document_mask(ends, self.seq_len)
        )

    @staticmethod
    def initial_distribution(fqn: str, config: Model) -> Normal | float:
        """Return the initial distribution of a parameter, or its constant. These are TorchTitan's choices, which follow
        the paper.

        Linears are normal with std 0.02 (TorchTitan truncates them at 100 sigma, which has no effect); the matrices
        that write to the residual stream, and w3, shrink with depth. A tied embedding starts as the head does: N(0, 1)
        would give huge logits.
        """
        head = Normal(config.dim**-0.5, cut=3.0)
        if "norm" in fqn:
            return 1.0
        if fqn.startswith("tok_embeddings."):
            return head if config.tie_embeddings else Normal(1.0)
        if fqn.startswith("output."):
            return head
        _, layer, *_, matrix = fqn.removesuffix(".weight").split(".")
        return Normal(0.02 / math.sqrt(2 * (int(layer) + 1))) if matrix in ("wo", "w2", "w3") else Normal(0.02)


class Block(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream [batch, seq, dim]."""

    # for each norm whose output only one module reads: that module
    normed = {
        "attention_norm": "attention",
        "ffn_norm": "feed_forward",
    }
    branch_scale = 1.0  # multiplies what is added to the residual stream (core/models/init.py)

    def __init__(self, config: Model):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.dim, config.ffn_width)
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor, rotary: Tensor, documents: Tensor | None = None) -> Tensor:
        """Run the layer. `rotary` has the form that `rotate` takes, `documents` the form that `SDPA` takes."""
        x = self.attend(x, rotary, documents)
        return x + scaled_by(self.branch_scale, self.feed_forward(self.ffn_norm(x)))

    def attend(self, x: Tensor, rotary: Tensor, documents: Tensor | None = None) -> Tensor:
        """Run the first half of the layer."""
        return x + scaled_by(self.branch_scale, self.attention(self.attention_norm(x), rotary, documents))


class Attention(nn.Module):
    """Causal attention with grouped queries: n_heads / n_kv_heads query heads share one key/value head. If the family
    has `qk_norm`, each query and key is normalized over its head's width before it is rotated.
    """

    projections = ("wq", "wk", "wv")  # linears of the same input, which `project` computes
    query_scale = 1.0  # multiplies the queries (core/models/init.py)

    def __init__(self, config: Model):
        """Create the projections, the norms of queries and keys if the family has them, and the attention kernel
        `sdpa`.
        """
        super().__init__()
        self.head_dim = config.head_width
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else None for _ in "qk"
        )
        self.sdpa = SDPA(config.attention)

    def forward(self, x: Tensor, rotary: Tensor, documents: Tensor | None = None) -> Tensor:
        """Project x [batch, seq, dim], rotate queries and keys, and attend. `documents` numbers each token's document."""
        # -1 heads: under tensor parallelism the linears return only this rank's heads.
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.project(x))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = scaled_by(self.query_scale, rotate(q, rotary)), rotate(k, rotary)
        h = self.sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), documents)
        return self.wo(h.transpose(1, 2).flatten(2))

    def project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values [batch, seq, width]."""
        return self.wq(x), self.wk(x), self.wv(x)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): w2(silu(w1 x) * w3 x)."""

    gated = ("w1", "w3", "w2")  # the linears of SwiGLU; this module computes nothing else

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.w1 = nn.Linear(dim, width, bias=False)
        self.w2 = nn.Linear(width, dim, bias=False)
        self.w3 = nn.Linear(dim, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TiedOutput(nn.Linear):
    """An output head that multiplies by the embedding's weight, and has no weight of its own.

    The Parameter has one owner and one name, so to_empty, checkpoints and optimizers cannot separate embedding and
    head. The class is a Linear, so that tensor parallelism plans it like any head. FSDP must leave the embedding in the
    root module's group, which stays gathered during the whole forward. In a separate group, the weight would be freed
    before the head needs it.
    """

    def __init__(self, embedding: nn.Embedding):
        nn.Module.__init__(self)
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.register_parameter("bias", None)
        self.embedding = (embedding,)  # a tuple hides the module from named_parameters and state_dict

    @property
    def weight(self) -> Tensor:  # type: ignore[override]  # the embedding's
        return self.embedding[0].weight


def scaled_by(scale: float, x: Tensor) -> Tensor:
    """Return x times a scale of the parametrization; x itself if the scale is 1, so that nothing is computed."""
    return x if scale == 1 else x * scale


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Apply the rotary position embedding (arXiv 2104.09864) to x [batch, seq, heads, head_dim], in fp32; returns the
    dtype of x.

    `rotary` holds cosines and sines: the table [seq or more, 2, head_dim / 2], or its rows at positions [batch, seq, 2,
    head_dim / 2].
    """
    table = rotary[: x.shape[1]] if rotary.dim() == 3 else rotary
    cos, sin = table.unsqueeze(-2).unbind(-3)  # cos and sin are [seq, 1, head_dim / 2] or [batch, seq, 1, head_dim / 2]
    # with this order of operations, compiled code writes no float32 gradient of the whole tensor
    a, b = (half.float() for half in x.chunk(2, dim=-1))
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)
