"""The order in which techniques are applied to a model (or to one stage of it) on the meta device."""
from __future__ import annotations

from torch import nn

from titan_hydra.config.family import family_of
from titan_hydra.config.schema import Job

from . import activation_checkpoint, compile, context, data, experts, formats, lora, simple_fsdp, tensor
from .mesh import Mesh

SHARDING = {"fsdp2": data.apply, "simple_fsdp": simple_fsdp.apply}  # by parallelism.backend


def apply(module: nn.Module, mesh: Mesh, job: Job) -> None:
    """Turn a meta-device module into this rank's part of it, in place.

    The order is the paper's, and each step needs the one before. FSDP comes last: it shards the parameters that the techniques before it
    have left on this rank.
    """
    blocks = family_of(job.model).blocks(module)
    tensor.apply(module, mesh, job, formats.linears(job))
    experts.apply(module, mesh, job)
    lora.apply(module, job)  # the adapters of a split linear are split as it is
    context.apply(module, mesh, job)
    activation_checkpoint.apply(blocks, job.ac)
    compile.apply(blocks, mesh, job.compile, module)
    SHARDING[job.parallelism.backend](module, mesh, job)
