"""Tensor and sequence parallelism: apply a family's plan (models/*/sharding.py) to the tensor-parallel ranks."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.private import set_async_tp, share_memory
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.schema import Job

from . import formats
from .experts import sparse_layers
from .mesh import Mesh
from .whole import Norm


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Split a meta-device stage's weights over the tp ranks, in place, and insert the communication that the plan
    requires.

    Every parameter becomes a DTensor, even those of norms, as optimizers and gradient clipping need lists of a single
    kind. Raises ConfigError for a parameter that the plan leaves out: each rank would train a copy of its own, with
    only a part of the gradient.
    """
    if mesh.degrees.tp == 1:
        return
    tp = mesh.world["tp"]
    norm = Norm(split=job.parallelism.sequence_parallel, reduce_dtype=getattr(torch, job.precision.reduce_dtype))
    # A head that returns the loss itself splits the vocabulary too, but returns no logits.
    logits_stay_split = job.parallelism.loss_parallel and job.loss.name == "cross_entropy"
    family = family_of(job.model)
    plan = family.part("sharding")(
        replace(job.parallelism, loss_parallel=logits_stay_split), norm, formats.linears(job)
    )
    parallelize_module(
        module, tp, {name: style for name, style in plan.around.items() if getattr(module, name) is not None}
    )
    for block in family.blocks(module).values():
        parallelize_module(block, tp, plan.of(block))
    for name in plan.around:
        if isinstance(part := getattr(module, name), nn.Embedding):
            part.register_forward_hook(_arrived)
    # the weights of experts need no style here: experts.py splits them later
    experts = {weight for layer in sparse_layers(module) for weight in layer.experts.parameters()}
    for name, weight in module.named_parameters():
        if not isinstance(weight, DTensor) and weight not in experts:
            raise ConfigError(
                f"parallelism.tp={tp.size()}: the sharding of {job.model.family} has no style for {name}; nearest legal: 1"
            )
    overlap(tp, job)


def _arrived(embedding: nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
    """Wait for the embedding's reduction over ranks. clone() waits, and passes gradients through.

    A compiled block whose input is still being communicated crashes in the backward or, under FSDP, gives the embedding
    a wrong gradient without an error.
    """
    return output.clone()


def overlap(tp: torch.distributed.DeviceMesh, job: Job) -> None:
    """Enable async tensor parallelism: the compiler cuts matmuls into pieces and communicates one piece while it
    computes the next.

    Raises ConfigError on a CPU, as the pieces are exchanged through memory that GPUs share.
    """
    if job.compile.name != "off":
        set_async_tp(job.parallelism.async_tp)
    if not job.parallelism.async_tp:
        return
    if tp.device_type != "cuda":
        raise ConfigError(
            "parallelism.async_tp=true: needs GPUs that read each other's memory, and this rank runs on the CPU; nearest legal: false"
        )
    share_memory(tp.get_group().group_name)


def loss_context(mesh: Mesh) -> contextlib.AbstractContextManager:
    """Return the context in which the loss and its backward run. It enables loss parallelism if the logits stay split over
    the vocabulary.
    """
    return loss_parallel() if mesh.degrees.tp > 1 and mesh.degrees.loss_parallel else contextlib.nullcontext()
