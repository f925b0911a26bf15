"""Split a model into pipeline stages, and join a rank's stages again under the plain names."""

from __future__ import annotations

import copy

from torch import nn

from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.pipeline import modules_of_stages, stages_of_ranks

from .mesh import Mesh


def split(model: nn.Module, mesh: Mesh, job: Job) -> list[nn.Module]:
    """Return this rank's stages of a meta-device model, in forward order: [model] without pipeline parallelism.

    A stage is the model without some modules, so parameters keep their names and thus their initial values and
    checkpoints.
    """
    if mesh.degrees.pp == 1:
        return [model]
    names, every = modules_of_stages(job), family_of(job.model).modules(job.model)
    return [_cut(copy.deepcopy(model), names[stage], every) for stage in stages_of_ranks(job)[mesh.coordinate("pp")]]


def _cut(model: nn.Module, kept: list[str], names: list[str]) -> nn.Module:
    """Remove, in place, all named modules of a model except those in `kept`. Modules of a container ("layers.3") are
    deleted, other children become None. A model whose forward is not its own closes the gaps by its method `close_gaps`.
    """
    for name in set(names) - set(kept):
        container, _, member = name.rpartition(".")
        if container:
            del model.get_submodule(container)[member]
        else:
            setattr(model, name, None)
    if hasattr(model, "close_gaps"):
        model.close_gaps()
    return model


def whole(stages: list[nn.Module]) -> nn.Module:
    """Join all of a rank's stages into one module under their plain names. Optimizers and checkpoints use this module;
    it cannot be run.
    """
    if len(stages) == 1:
        return stages[0]
    shell = nn.Module()
    children = [child for stage in stages for child in stage.named_children()]
    # Blocks come first, so that sums over parameters keep their order.
    for name, child in sorted(children, key=lambda child: not isinstance(child[1], nn.ModuleDict)):
        if isinstance(child, nn.ModuleDict) and hasattr(shell, name):
            getattr(shell, name).update(child)
        else:
            shell.add_module(name, nn.ModuleDict(dict(child.items())) if isinstance(child, nn.ModuleDict) else child)
    return shell
