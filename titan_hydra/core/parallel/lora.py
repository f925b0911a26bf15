"""Low-rank adapters (LoRA, arXiv 2106.09685): linears with a frozen weight, plus the product of two thin matrices that
are trained.

An adapted linear computes x W' + (alpha / rank) x A' B'. A [rank, inputs] starts with normal numbers, whose standard
deviation is that of the paper's code and PEFT. B [outputs, rank] starts at zero, so the model is unchanged at the
start. The weight keeps its name: checkpoints, Hugging Face names and the plan of tensor parallelism are the same as
without adapters. With adapter.experts, each matrix of each routed expert has two such matrices, which are stacked as the
experts are: A [experts, rank, inputs] and B [experts, outputs, rank].
"""

from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.adapter import adapted, adapts, adapts_experts
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.parts import LowRank
from titan_hydra.core.job.config.registry import ADAPTERS, resolve
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.kernels.grouped import grouped_matmul

from .experts import sparse_layers
from .formats.select import is_plain
from .mesh import Mesh
from .whole import read_whole


class LoraLinear(nn.Linear):
    """A linear with an adapter. `apply` turns plain linears into such linears."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    factor: float
    reduce_dtype: torch.dtype  # dtype in which gradients are summed over the tensor-parallel ranks
    initial_std: dict[str, float]  # standard deviations of A and B at the start (core/models/init.py)

    def forward(self, x: Tensor) -> Tensor:
        """Return the linear's output plus factor * B A x; under tensor parallelism, A and B are split as the linear is."""
        base = super().forward(x)
        if not isinstance(x, DTensor):
            return base + self.factor * F.linear(F.linear(x, self.lora_a), self.lora_b)
        # The following computes on plain tensors. In a column linear, x is whole, and a rank's part of B gives the
        # rank's part of the output. In a row linear, a rank's parts of x and A give one summand of the whole output, as
        # the rank's part of the weight does.
        whole = x.placements[0].is_replicate()
        part = x.to_local(grad_placements=[Partial()] if whole else None)
        product = self.factor * F.linear(F.linear(part, self._here(self.lora_a)), self._here(self.lora_b))
        return base + DTensor.from_local(product, x.device_mesh, [Shard(-1) if whole else Partial()], run_check=False)

    def _here(self, parameter: Tensor) -> Tensor:
        """Return this rank's part of a matrix. If the matrix is replicated, each rank has a partial gradient of it."""
        return (
            parameter.to_local()
            if parameter.placements[0].is_shard()
            else read_whole(parameter, self.reduce_dtype, Partial())
        )


@cache
def adapted_experts(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of a class of experts whose products include those of adapters. The subclass has the name of
    its class.
    """

    def product(self: Any, name: str, rows: Tensor, ends: Tensor, multiply: Any) -> Tensor:
        base = kind.product(self, name, rows, ends, multiply)
        a, b = (self.read(getattr(self, f"lora_{part}_{name}")) for part in "ab")
        return base + self.factor * multiply(grouped_matmul(rows, a, ends, ""), b, ends, "")

    return type(kind.__name__, (kind,), {"product": product, "__module__": kind.__module__})


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Freeze the weights of a meta-device stage, in the compute dtype, and add adapters to linears of its blocks, in
    place.

    Call this after tensor parallelism: the adapters are split to match the weight. For a column linear, A is whole and
    B is split by rows; for a row linear, A is split by columns and B is whole. Frozen weights need no higher precision
    than the compute dtype, to which every forward would round them.
    """
    if not adapts(job):
        return
    adapt = resolve(ADAPTERS[job.adapter.name].adapt)
    dtype = getattr(torch, job.precision.compute_dtype)
    for owner in module.modules():
        # new Parameters are registered, as assigning `data` would not change the dtype of a DTensor's local tensor
        for name, parameter in list(owner.named_parameters(recurse=False)):
            owner.register_parameter(name, nn.Parameter(parameter.detach().to(dtype), requires_grad=False))
    wanted = {linear.name for linear in adapted(job)}
    for block in family_of(job.model).blocks(module).values():
        linears = [
            linear
            for name, linear in block.named_modules()
            if isinstance(linear, nn.Linear) and name.rpartition(".")[2] in wanted
        ]
        if not linears:
            raise ConfigError(
                f"adapter={job.adapter.name}: a block of {job.model.family} has no linear {' or '.join(sorted(wanted))}"
            )
        for linear in linears:
            adapt(linear, job)
        if adapts_experts(job):
            for layer in sparse_layers(block):
                resolve(ADAPTERS[job.adapter.name].adapt_experts)(layer.experts, job)


def adapt(linear: nn.Linear, job: Job) -> None:
    """Turn a linear into one with an adapter, in place. Raises ConfigError for a module of another class, whose own
    forward would be lost.
    """
    if not is_plain(linear):
        raise ConfigError(
            f"adapter={job.adapter.name}: adapts plain linears, and one of {job.model.family} is a {type(linear).__name__}; "
            "nearest legal: none, or adapter.linears without it"
        )
    config = cast(LowRank, job.adapter)
    rank, dtype = config.rank, getattr(torch, job.precision.param_dtype)
    outputs, inputs = linear.weight.shape
    linear.__class__ = LoraLinear
    lora = cast(LoraLinear, linear)
    lora.factor, lora.reduce_dtype = config.alpha / rank, getattr(torch, job.precision.reduce_dtype)
    lora.initial_std = {"lora_a": (3 * inputs) ** -0.5, "lora_b": 0.0}
    for name, shape, split in (("lora_a", (rank, inputs), 1), ("lora_b", (outputs, rank), 0)):
        matrix = torch.empty(shape, dtype=dtype, device="meta")
        if isinstance(linear.weight, DTensor):
            placement = Shard(split) if linear.weight.placements[0].is_shard(split) else Replicate()
            matrix = distribute_tensor(matrix, linear.weight.device_mesh, [placement], src_data_rank=None)
        linear.register_parameter(name, nn.Parameter(matrix))


def adapt_experts(experts: nn.Module, job: Job) -> None:
    """Give stacked experts adapters, in place. A rank has the adapters of its own experts. Raises ConfigError for a module
    whose class does not say that it computes `product`.
    """
    if "product" not in vars(type(experts)):
        raise ConfigError(
            f"adapter.experts=true: {type(experts).__name__} of {job.model.family} has a forward of its own; nearest legal: false"
        )
    config, dtype = cast(LowRank, job.adapter), getattr(torch, job.precision.param_dtype)
    matrices, made = list(experts.named_parameters()), cast(Any, experts)
    made.__class__ = cast(Any, adapted_experts)(type(made))
    made.factor, made.initial_std = config.alpha / config.rank, {}
    for name, weight in matrices:
        number, outputs, inputs = weight.shape
        made.initial_std |= {f"lora_a_{name}": (3 * inputs) ** -0.5, f"lora_b_{name}": 0.0}
        for part, shape in (("a", (number, config.rank, inputs)), ("b", (number, outputs, config.rank))):
            matrix = torch.empty(shape, dtype=dtype, device="meta")
            if isinstance(weight, DTensor):  # on the mesh of ep ranks
                matrix = distribute_tensor(matrix, weight.device_mesh, weight.placements, src_data_rank=None)
            experts.register_parameter(f"lora_{part}_{name}", nn.Parameter(matrix))
