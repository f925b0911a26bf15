"""Initial weights independent of the layout: every element is a function of (seed, parameter name, index in the full
tensor).

A counter-based generator makes that cheap: a rank draws only the elements of its shard, and never holds a full tensor.
Whole models, sharded models (FSDP, HSDP, tensor parallel, evenly or not) and stages start from the same bits.
"""

import hashlib
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.parametrization import Rules

CHUNK = 1 << 16  # elements that are drawn at a time, so that the int64 scratch memory (0.5 MiB) stays in a core's cache
# elements drawn at a time on a GPU: in small chunks, 8 billion parameters would need four million kernel launches
GPU_CHUNK = 1 << 22
# prefixes that activation checkpointing and torch.compile add to names
WRAPPERS = (
    "_checkpoint_wrapped_module.",
    "_orig_mod.",
)


@dataclass(frozen=True)
class Normal:
    """A normal distribution around 0, truncated at `cut` times the standard deviation `std` that it has before
    truncation.
    """

    std: float
    cut: float | None = None


@torch.no_grad()
def init_weights(module: nn.Module, config: Model, seed: int, rules: Rules | None = None) -> None:
    """Fill a model or pipeline stage, already on its device, with its initial weights (DTensors included) and recompute
    its buffers. Without `rules` the parametrization is the standard one.
    """
    rules = rules or Rules(config)
    for name, parameter in module.named_parameters():
        fqn, (owner, _, leaf) = clean_name(name), name.rpartition(".")
        # adapters have their own distributions, which a family does not list
        stated = getattr(module.get_submodule(owner), "initial_std", {})
        if leaf in stated:
            distribution = Normal(stated[leaf]) if stated[leaf] else 0.0
        else:
            start = rules.start(fqn)
            distribution = module.initial_distribution(start.name, start.config)
            if isinstance(distribution, Normal):
                distribution = replace(distribution, std=distribution.std * start.factor)
        fill(parameter, distribution, key_of_parameter(seed, fqn))
    reset_buffers(module)


def scale_forward(model: nn.Module, config: Model, rules: Rules) -> None:
    """Give the modules of a whole model the scales of its parametrization. Raises ConfigError if a module has no
    attribute for its scale, unless the scale is 1.
    """
    blocks = list(family_of(config).blocks(model).values())
    scales = (
        ("output_scale", rules.output, [model]),
        ("branch_scale", rules.branch, blocks),
        ("query_scale", rules.attention, [block.attention for block in blocks] if rules.attention != 1 else []),
    )
    for attribute, scale, modules in scales:
        for module in modules if scale != 1 else ():
            if not hasattr(module, attribute):
                raise ConfigError(f"model.family={config.family}: a {type(module).__name__} has no {attribute}")
            setattr(module, attribute, scale)


def reset_buffers(module: nn.Module) -> None:
    """Recompute the buffers of a model or stage, which are uninitialized after `to_empty`."""
    for part in module.modules():
        if hasattr(part, "reset_buffers"):
            part.reset_buffers()


def clean_name(name: str) -> str:
    """Return the parameter's name in the plain model, without the parts that wrappers add."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def key_of_parameter(seed: int, fqn: str) -> int:
    """Return a 64-bit key for the random numbers of one parameter."""
    return int.from_bytes(hashlib.blake2b(f"{seed}:{fqn}".encode(), digest_size=8).digest(), "little", signed=True)


def fill(parameter: Tensor, distribution: Normal | float, key: int) -> None:
    """Fill this rank's shard of a parameter, at most a fixed number of rows at a time."""
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if not isinstance(distribution, Normal):
        local.fill_(distribution)
        return
    offsets, _ = local_box(parameter)
    strides = [math.prod(parameter.shape[dim + 1 :]) for dim in range(parameter.dim())]
    chunk = CHUNK if local.device.type == "cpu" else GPU_CHUNK
    rows = max(1, chunk // max(1, math.prod(local.shape[1:])))
    for start in range(0, local.shape[0] if local.numel() else 0, rows):
        part = local[start : start + rows]
        index = torch.zeros(part.shape, dtype=torch.int64, device=part.device)
        for dim, (size, stride) in enumerate(zip(part.shape, strides, strict=True)):
            first = offsets[dim] + (start if dim == 0 else 0)
            counts = torch.arange(first, first + size, device=part.device) * stride
            index += counts.view(-1, *[1] * (part.dim() - dim - 1))
        part.copy_(normal(index, distribution, key))


def normal(index: Tensor, distribution: Normal, key: int) -> Tensor:
    """Return normal numbers (fp32) for flat indices (int64, overwritten). Each index is hashed, 24 bits of the hash give
    a uniform number, and the inverse of the normal CDF makes it normal.

    The hash is splitmix64's: a Weyl sequence from `key` through a 64-bit finalizer. 24 bits reach 5.4 standard
    deviations.
    """
    # ((2k + 1) / 2^24 - 1) for k of 24 bits: odd, symmetric around 0, never +-1, and exact in fp32.
    uniform = shift_right(splitmix64_(index, key), 40).mul_(2).add_(1 - (1 << 24)).to(torch.float32)
    reach = 1.0 if distribution.cut is None else math.erf(distribution.cut / math.sqrt(2))
    return uniform.mul_(reach * 2.0**-24).erfinv_().mul_(math.sqrt(2) * distribution.std)


def splitmix64_(index: Tensor, key: int) -> Tensor:
    """Hash each index in place; int64 arithmetic wraps, as the algorithm requires.
    https://prng.di.unimi.it/splitmix64.c
    """
    z = index.mul_(_signed(0x9E3779B97F4A7C15)).add_(key)
    z.bitwise_xor_(shift_right(z, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    z.bitwise_xor_(shift_right(z, 27)).mul_(_signed(0x94D049BB133111EB))
    return z.bitwise_xor_(shift_right(z, 31))


def shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift an int64 tensor logically: torch's `>>` copies the sign bit, which the mask removes."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


def _signed(x: int) -> int:
    """Return an unsigned 64-bit constant as the int64 with the same bits."""
    return x - (1 << 64) if x >> 63 else x


def local_box(parameter: Tensor, coordinate: list[int] | None = None) -> tuple[list[int], list[int]]:
    """Return the offsets and sizes of a shard in the dimensions of the full tensor. The shard is this rank's, or the
    one at another mesh coordinate.

    Every dimension is split as torch.chunk does, so shards are contiguous.
    """
    offsets, sizes = [0] * parameter.dim(), list(parameter.shape)
    if not isinstance(parameter, DTensor):
        return offsets, sizes
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate() if coordinate is None else coordinate
    for mesh_dim, dim in split_order(parameter):
        chunk = -(-sizes[dim] // mesh.size(mesh_dim))
        start = min(coordinate[mesh_dim] * chunk, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(chunk, sizes[dim] - start)
    return offsets, sizes


def split_order(parameter: DTensor) -> list[tuple[int, int]]:
    """Return (mesh dim, tensor dim) of each split, in the order of the splits.

    A plain Shard splits before the mesh dimensions to its right. A strided shard (FSDP over tensor parallel) is split
    off later: its split factor is the number of parts into which other mesh dimensions have split the same tensor
    dimension before.
    """
    order: list[tuple[int, int]] = []
    for mesh_dim in reversed(range(parameter.device_mesh.ndim)):
        placement = parameter.placements[mesh_dim]
        dim = getattr(placement, "dim", None)
        if dim is None:  # replicated
            continue
        position, before = 0, 1
        while before < getattr(placement, "split_factor", 1):
            earlier_mesh_dim, earlier_dim = order[position]
            before *= parameter.device_mesh.size(earlier_mesh_dim) if earlier_dim == dim else 1
            position += 1
        order.insert(position, (mesh_dim, dim))
    return order
