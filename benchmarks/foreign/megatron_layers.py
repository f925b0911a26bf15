"""Two blocks of Megatron-core's tensor-parallel linears, vocabulary-parallel embedding and cross-entropy, on gloo ranks:
Subjects of `titan verify --module`. The reference is the same arithmetic in plain torch.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)
from torch import nn

from titan_hydra.instruments.verify.subject import Subject

DIM, WIDTH, VOCABULARY = 32, 64, 96
SPLIT = {"up": 0, "down": 1, "head": 0, "embedding": 0}  # dimension of each weight that the tensor-parallel ranks split


class Block(nn.Module):
    """A feed-forward network with its norm; the linears may be Megatron's."""

    def __init__(self, up, down):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), up, down

    def forward(self, x):
        return x + output(self.down, F.gelu(output(self.up, self.norm(x))))


class Model(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self, embedding, blocks, head):
        super().__init__()
        self.embedding, self.blocks, self.head = embedding, nn.Sequential(*blocks), head

    def forward(self, tokens):
        return output(self.head, self.blocks(self.embedding(tokens)))


def output(linear, x):
    """Return a linear's output, without the bias that Megatron's linears return beside it."""
    found = linear(x)
    return found[0] if isinstance(found, tuple) else found


def build():
    """Return the whole model in plain torch, with the same weights at every call."""
    torch.manual_seed(1)
    blocks = [Block(nn.Linear(DIM, WIDTH), nn.Linear(WIDTH, DIM)) for _ in range(2)]
    return Model(nn.Embedding(VOCABULARY, DIM), blocks, nn.Linear(DIM, VOCABULARY, bias=False))


def parallelize(model, mesh):
    """Build the same model from Megatron's layers, and copy this rank's part of each weight into it."""
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=mesh.size())
    options = ModelParallelConfig(
        tensor_model_parallel_size=mesh.size(),
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        async_tensor_model_parallel_allreduce=False,
    )
    common = {"config": options, "init_method": nn.init.zeros_}
    blocks = [
        Block(
            ColumnParallelLinear(DIM, WIDTH, gather_output=False, **common),
            RowParallelLinear(WIDTH, DIM, input_is_parallel=True, bias=True, skip_bias_add=False, **common),
        )
        for _ in range(2)
    ]
    parts = Model(
        VocabParallelEmbedding(VOCABULARY, DIM, **common),
        blocks,
        ColumnParallelLinear(DIM, VOCABULARY, bias=False, gather_output=False, **common),
    )
    whole = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in parts.named_parameters():
            value = whole[name]
            dim = split_dim(name)
            parameter.copy_(value if dim is None else value.chunk(mesh.size(), dim)[mesh.get_local_rank()])
    return parts


def split_dim(name):
    """Return the dimension along which a parameter is split; None if every rank has a copy."""
    owner, _, leaf = name.rpartition(".")
    owner = owner.rpartition(".")[2]
    if leaf == "bias":
        return 0 if owner == "up" else None
    return SPLIT.get(owner)


def join(name, tensor, mesh):
    """Join the parts of a parameter or gradient from all ranks."""
    dim = split_dim(name)
    if dim is None:
        return tensor
    parts = [torch.empty_like(tensor) for _ in range(mesh.size())]
    dist.all_gather(parts, tensor.contiguous())
    return torch.cat(parts, dim)


def norm(model, mesh):
    """Return the gradient's norm: squares of split weights are summed over ranks, those of copies count once."""
    split, copies = torch.zeros(()), torch.zeros(())
    for name, parameter in model.named_parameters():
        square = parameter.grad.square().sum()
        if split_dim(name) is None:
            copies += square
        else:
            split += square
    dist.all_reduce(split)
    return (split + copies).sqrt()


def batch(step):
    """Return the tokens and labels of a step."""
    dice = torch.Generator().manual_seed(step)
    return {name: torch.randint(VOCABULARY, (8, 16), generator=dice) for name in ("tokens", "labels")}


def loss(model, samples, mesh):
    """Return the mean loss. Several ranks compute it by Megatron's cross-entropy of split logits."""
    logits = model(samples["tokens"])
    if mesh is None:
        return F.cross_entropy(logits.flatten(0, 1), samples["labels"].flatten())
    return vocab_parallel_cross_entropy(logits, samples["labels"]).mean()


tp = Subject(
    mesh={"tp": 2}, model=build, parallelize=parallelize, batch=batch, loss=loss, norm=norm, whole=join, accumulation=2
)
