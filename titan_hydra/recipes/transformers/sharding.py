"""How tensor parallelism splits a model of transformers: by its linears, which transformers' own plan of the model names.

Only the names of transformers' plan are used. Its hooks are not, as they sum a norm's gradient anew after every backward
(docs/lab/transformers-qk-norm.md): here each backward sums its own part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.schema import Parallelism
from titan_hydra.core.parallel.plans import Linears, Plan
from titan_hydra.core.parallel.whole import Norm, read_whole

LINEARS = {  # a word of transformers' plans: the style of a linear
    "colwise": ColwiseParallel(),
    "rowwise": RowwiseParallel(),
    "colwise_gather_output": ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": RowwiseParallel(input_layouts=Replicate()),
}
HEADS = {f"self_attn.{name}_proj": "colwise" for name in "qkv"} | {"self_attn.o_proj": "rowwise"}
NORMS_OF_HEADS = ("q_norm", "k_norm")


def plan(config: Parallelism, norm: Norm, linears: Linears) -> Plan:
    """Return a plan in which every rank has the whole residual stream. Heads and the feed-forward are split as the model
    allows; whatever is no linear of transformers' plan, such as experts, is held whole by every rank.

    A number format's own styles (`linears`) gather inputs in the format. Here no linear's input is gathered, and torch's
    styles split converted linears too: the format casts the distributed tensors.
    """
    logits = Shard(-1) if config.loss_parallel else Replicate()
    return LibraryPlan(
        around={
            "tok_embeddings": SplitRows(norm.reduce_dtype),
            "norm": PlainWeights(norm.reduce_dtype, Replicate()),
            "output": ColwiseParallel(output_layouts=logits, use_local_output=not config.loss_parallel),
        },
        block={},
        reduce_dtype=norm.reduce_dtype,
    )


@dataclass(frozen=True)
class LibraryPlan(Plan):
    """A plan that is read from each block. Its styles have the names of the modules that have parameters of their own."""

    reduce_dtype: torch.dtype = torch.float32

    def of(self, block: nn.Module) -> dict[str, ParallelStyle]:
        """Return the styles of a block's modules. Raises ConfigError for a parameter of attention that is not of heads."""
        theirs, config = words_of_plan(block), config_of(block)
        split = theirs.get("self_attn.q_proj") == "colwise"  # whether a rank has only some heads
        styles: dict[str, ParallelStyle] = {}
        for name, part in block.named_modules():
            parameters = dict(part.named_parameters(recurse=False))
            if not parameters:
                continue
            if theirs.get(name) in LINEARS:
                if not isinstance(part, nn.Linear):  # a module that is held whole would compute all heads on every rank
                    reason = f"{name} of a {type(block).__name__} is a {type(part).__name__}, which is not split"
                    raise ConfigError(f"parallelism.tp: {reason}; nearest legal: 1")
                styles[name] = LINEARS[theirs[name]]
            elif split and name == "self_attn":
                if wrong := [
                    parameter_name
                    for parameter_name, weight in parameters.items()
                    if weight.shape != (config.num_attention_heads,)
                ]:
                    raise ConfigError(
                        f"parallelism.tp: {name}.{wrong[0]} of a {type(block).__name__} does not belong to heads; nearest legal: 1"
                    )
                styles[name] = PlainWeights(self.reduce_dtype, None)
            else:
                of_heads = split and name.rpartition(".")[2] in NORMS_OF_HEADS
                styles[name] = PlainWeights(self.reduce_dtype, Partial() if of_heads else Replicate())
        return styles


def config_of(block: nn.Module) -> Any:
    """Return transformers' configuration object of a block."""
    parts: list[Any] = list(block.modules())
    return next(part.config for part in parts if hasattr(part, "config"))


def words_of_plan(block: nn.Module) -> dict[str, str]:
    """Return for modules of a block the words of transformers' plan or, if the model has none, those of its heads."""
    plan = config_of(block).base_model_tp_plan or {}
    return {name.removeprefix("layers.*."): word for name, word in plan.items()} or HEADS


class PlainWeights(ParallelStyle):
    """A module of any class whose forward sees plain weights. Its gradient arises on each rank as `gradient` says: whole,
    or as a part that is summed in each backward. None: each rank has its part of the weights, along their first dimension.
    """

    def __init__(self, reduce_dtype: torch.dtype, gradient: Placement | None, split: bool = False):
        super().__init__()
        self.reduce_dtype, self.gradient, self.split = reduce_dtype, gradient, split or gradient is None

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Distribute the weights, and change the module's class to one that shows its forward plain tensors."""
        placement = Shard(0) if self.split else Replicate()
        for name, weight in list(module.named_parameters(recurse=False)):
            held = distribute_tensor(weight, mesh, [placement], src_data_rank=None)
            module.register_parameter(name, nn.Parameter(held))
        part: Any = module
        part.reduce_dtype, part.gradient_arises = self.reduce_dtype, self.gradient
        part.__class__ = type(type(module).__name__, (_Plain, type(module)), {})
        return module


class _Plain(nn.Module):
    """Shows plain weights to the forward of the class that follows."""

    def forward(self, *args: Any, **options: Any) -> Any:
        own: Any = self
        weights: dict[str, Any] = dict(self.named_parameters(recurse=False))
        arises = own.gradient_arises
        plain = {
            name: weight.to_local() if arises is None else read_whole(weight, own.reduce_dtype, arises)
            for name, weight in weights.items()
        }
        self.__dict__.update(plain)  # attributes of the object hide the parameters
        try:
            return super().forward(*args, **options)
        finally:
            for name in plain:
                del self.__dict__[name]


class SplitRows(ParallelStyle):
    """An embedding whose rows are split. One that computes more than a look-up, as Gemma's, reads all rows in its forward."""

    def __init__(self, reduce_dtype: torch.dtype):
        super().__init__()
        self.reduce_dtype = reduce_dtype

    def _apply(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        if type(module) is nn.Embedding:
            style: Any = RowwiseParallel(input_layouts=Replicate())
        else:
            style = PlainWeights(self.reduce_dtype, Replicate(), split=True)
        return parallelize_module(module, mesh, style)
