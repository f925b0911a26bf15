"""The order in which techniques are applied to a model (or to one stage of it) on the meta device."""

from __future__ import annotations

from torch import nn

from titan_hydra.core.job.config.schema import Job

from . import activation_checkpoint, compile, context, data, experts, logits, lora, simple_fsdp, tensor
from .mesh import Mesh

# `lora` comes after `tensor`, as adapters are split like their linear; `logits` measures what `context` has replaced.
TECHNIQUES = (tensor, experts, lora, context, logits, activation_checkpoint, compile)
SHARDING = {"fsdp2": data.apply, "simple_fsdp": simple_fsdp.apply}  # by parallelism.backend


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Turn a meta-device module into this rank's part of it, in place.

    The order is that of the TorchTitan paper, and each technique needs the one before. FSDP comes last: it shards the
    parameters that remain on this rank after the other techniques.
    """
    for technique in TECHNIQUES:
        technique.apply(module, mesh, job)
    SHARDING[job.parallelism.backend](module, mesh, job)
