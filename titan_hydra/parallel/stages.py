"""Split a model into pipeline stages, and join a rank's stages again under the plain names."""
from __future__ import annotations

import copy

from torch import nn

from titan_hydra.config.rules import pipeline as layout
from titan_hydra.config.schema import Job

from .mesh import Mesh


def split(model: nn.Module, mesh: Mesh, job: Job) -> list[nn.Module]:
    """Return this rank's stages of a meta-device model, in forward order: [model] without pipeline parallelism.

    A stage is the model without some modules, so parameters keep their names and thus their initial values and checkpoints.
    """
    if mesh.degrees.pp == 1:
        return [model]
    names = layout.modules_of_stages(job)
    return [cut(copy.deepcopy(model), names[stage]) for stage in layout.stages_of_ranks(job)[mesh.coordinate("pp")]]


def cut(model: nn.Module, names: list[str]) -> nn.Module:
    """Leave only the named modules in a model, in place: other blocks are deleted, other children become None."""
    for block in list(model.layers):
        if f"layers.{block}" not in names:
            del model.layers[block]
    for child in [child for child, _ in model.named_children() if child != "layers" and child not in names]:
        setattr(model, child, None)
    return model


def whole(stages: list[nn.Module]) -> nn.Module:
    """Join all of a rank's stages into one module under their plain names, for optimizers and checkpoints. It cannot be run."""
    if len(stages) == 1:
        return stages[0]
    shell = nn.Module()
    shell.layers = nn.ModuleDict()
    for stage in stages:
        for name, child in stage.named_children():
            if name == "layers":
                shell.layers.update(child)
            else:
                shell.add_module(name, child)
    return shell
