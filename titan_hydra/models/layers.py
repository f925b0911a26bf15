"""Layers of decoder-only transformers: attention, feed-forward, a tied head, rotary positions, masks of packed documents.

They run on one device and know nothing of ranks. Rotary positions pair the two halves of a head as Hugging Face does, so weights need no
permutation to or from its format.
"""
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from titan_hydra.base.errors import ConfigError
from titan_hydra.config.load import ffn_width
from titan_hydra.config.schema import Model


class Block(nn.Module):
    """One pre-norm layer: attention, then feed-forward, each added to the residual stream [batch, seq, dim]."""

    def __init__(self, config: Model):
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config.dim, ffn_width(config))
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None) -> Tensor:
        """Run the layer. `rotary` is as `rotate` takes it; `mask` is None (causal) or boolean, True where a query sees a key."""
        x = x + self.attention(self.attention_norm(x), rotary, mask)
        return x + self.feed_forward(self.ffn_norm(x))


class Attention(nn.Module):
    """Causal attention with grouped queries: n_heads / n_kv_heads query heads share one key/value head."""

    def __init__(self, config: Model):
        super().__init__()
        self.head_dim = config.dim // config.n_heads
        self.wq = nn.Linear(config.dim, config.n_heads * self.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * self.head_dim, config.dim, bias=False)
        self.sdpa = SDPA(config.attention)

    def forward(self, x: Tensor, rotary: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, seq, _ = x.shape
        # -1 heads: under tensor parallelism the linears return only this rank's.
        q = rotate(self.wq(x).view(batch, seq, -1, self.head_dim), rotary)
        k = rotate(self.wk(x).view(batch, seq, -1, self.head_dim), rotary)
        v = self.wv(x).view(batch, seq, -1, self.head_dim)
        h = self.sdpa(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), mask)
        return self.wo(h.transpose(1, 2).reshape(batch, seq, -1))


class SDPA(nn.Module):
    """The attention kernel on q, k, v [batch, heads, seq, head_dim]; a module of its own so that context parallelism can replace it."""

    BACKENDS = {
        # On an H200 cuDNN ran 1.7 to 1.9 times as fast as torch's flash attention; the others serve dtypes and cards it refuses.
        "auto": [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH],
        "cudnn": [SDPBackend.CUDNN_ATTENTION],
        "flash": [SDPBackend.FLASH_ATTENTION],
        "efficient": [SDPBackend.EFFICIENT_ATTENTION],
        "math": [SDPBackend.MATH],
    }

    def __init__(self, backend: str):
        super().__init__()
        self.backend = backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Compute causal attention if `mask` is None; otherwise `mask` (boolean, True where a query sees a key) alone decides."""
        if self.backend in ("cudnn", "efficient") and q.device.type == "cpu":
            raise ConfigError(f"model.attention={self.backend}: does not exist on the CPU; nearest legal: auto, flash or math")
        if self.backend == "efficient":  # does not support grouped queries
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        grouped = q.shape[1] != k.shape[1]
        if self.backend == "auto" and q.device.type != "cuda":
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)
        with sdpa_kernel(self.BACKENDS[self.backend], set_priority=True):
            return F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None, enable_gqa=grouped)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim: int, width: int):
        super().__init__()
        self.w1 = nn.Linear(dim, width, bias=False)
        self.w2 = nn.Linear(width, dim, bias=False)
        self.w3 = nn.Linear(dim, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class TiedOutput(nn.Linear):
    """An output head that multiplies by the embedding's weight and has none of its own.

    The Parameter has one owner and one name, so to_empty, checkpoints and optimizers cannot separate the two. It is a Linear, so that
    tensor parallelism plans it like any head. FSDP must leave the embedding in the root's group, which stays gathered during the root's
    forward: in a group of its own the weight would be freed before the head needs it.
    """

    def __init__(self, embedding: nn.Embedding):
        nn.Module.__init__(self)
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings
        self.register_parameter("bias", None)
        self.embedding = (embedding,)  # in a tuple, which hides it from named_parameters and state_dict

    @property
    def weight(self) -> Tensor:
        return self.embedding[0].weight


def rotate(x: Tensor, rotary: Tensor) -> Tensor:
    """Apply the rotary position embedding (arXiv 2104.09864) to x [batch, seq, heads, head_dim], in fp32; returns the dtype of x.

    `rotary` holds cosines and sines: the table [seq or more, 2, head_dim / 2], or its rows at positions [batch, seq, 2, head_dim / 2].
    """
    table = rotary[: x.shape[1]] if rotary.dim() == 3 else rotary
    cos, sin = table.unsqueeze(-2).unbind(-3)  # each [seq or (batch, seq), 1, head_dim / 2]
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def document_mask(documents: Tensor) -> Tensor:
    """Return the mask [batch, 1, seq, seq], True for earlier tokens of the same document. Built once for all layers."""
    same = documents.unsqueeze(2) == documents.unsqueeze(1)
    return same.tril().unsqueeze(1)


def document_positions(documents: Tensor) -> Tensor:
    """Return positions [batch, seq] that restart at 0 wherever the document id changes."""
    index = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    starts = torch.zeros_like(documents, dtype=torch.bool)
    starts[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(starts, index, 0).cummax(dim=1).values
