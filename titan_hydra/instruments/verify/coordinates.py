"""Measure how much training steps change the activations of models of several sizes, and which losses the models reach.
`titan verify widths` compares the sizes.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_hydra.core import data
from titan_hydra.core.data.batch import Batch
from titan_hydra.core.job.config import Job, from_dict, to_dict
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.core.train.optimizer import lr_factor, set_lr
from titan_hydra.core.train.trainer import Trainer, build

from .processes import share_over_cores

Activations = dict[str, list[Tensor]]  # by kind: the output of each module of that kind


def measured_sizes(jobs: list[Job]) -> list[dict[str, Any]]:
    """Train each job in one process. Return for each job its `losses`, and the root mean square of each kind of
    activation on the first batch: at the `start`, at the `end`, and of the `change` between start and end.
    """
    with tempfile.TemporaryDirectory() as folder:
        # jobs go to the processes in turn, the largest job first, so that all processes take equally long
        order = sorted(range(len(jobs)), key=lambda number: -jobs[number].model.dim * jobs[number].model.n_layers)
        share_over_cores(_measure, folder, [(number, to_dict(jobs[number])) for number in order])
        return [json.loads(Path(folder, f"{number}.json").read_text()) for number in range(len(jobs))]


def _measure(device: torch.device, folder: str, jobs: list[tuple[int, dict]]) -> None:
    mesh: Mesh | None = None
    for number, config in jobs:
        job = from_dict(Job, config)
        trainer = build(job, device, mesh)
        mesh = trainer.mesh
        Path(folder, f"{number}.json").write_text(json.dumps(_run(job, trainer)))


def _run(job: Job, trainer: Trainer) -> dict[str, Any]:
    """Train the job's steps. Return the losses and, for each kind of activation on the first microbatch, its size before
    and after the training, and the size of its change.
    """
    loader = data.build(job, 0, 1)
    batch = loader.next()
    probe, losses = trainer.prepare(batch.split(job.data.local_batch)[0]), []
    start = activations(trainer, probe)
    for step in range(1, job.steps + 1):
        set_lr(trainer.optimizers, lr_factor(step, job.steps, job.lr_scheduler))
        agreement = trainer.agree(trainer.forward_backward(batch), trainer.measure())
        trainer.update(agreement)
        losses.append(agreement.read()[0])
        batch = loader.next() if step < job.steps else batch
    loader.close()
    end = activations(trainer, probe)
    change = {kind: [b - a for a, b in zip(start[kind], end[kind], strict=True)] for kind in start}
    sizes = {"start": start, "end": end, "change": change}
    return {"losses": losses} | {
        name: {kind: root_mean_square(values) for kind, values in values_by_kind.items()}
        for name, values_by_kind in sizes.items()
    }


def root_mean_square(values: list[Tensor]) -> float:
    """Return the root mean square over all elements of several tensors of equal size."""
    return torch.stack([value.double().square().mean() for value in values]).mean().sqrt().item()


@torch.no_grad()
def activations(trainer: Trainer, batch: Batch) -> Activations:
    """Return the activations of a local batch, by kind: embedding, attention, feed-forward, router and logits."""
    by_kind: Activations = {}
    with contextlib.ExitStack() as hooks:
        for kind, module in _watched(trainer.model, trainer.job):
            handle = (
                module.register_forward_pre_hook(_router_logits(by_kind.setdefault(kind, [])))
                if kind == "router"
                else module.register_forward_hook(_outputs(by_kind.setdefault(kind, [])))
            )
            hooks.callback(handle.remove)
        trainer.prepare_weights()
        trainer.step.forward(batch)
    return by_kind


def _watched(model: Any, job: Job) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules whose outputs are measured, each with its kind."""
    yield "embedding", model.tok_embeddings
    for block in family_of(job.model).blocks(model).values():
        yield "attention", block.attention
        yield "feed-forward", block.feed_forward
        if hasattr(block.feed_forward, "router"):
            yield "router", block.feed_forward.router
    yield "logits", model.output


def _outputs(into: list[Tensor]) -> Callable[..., None]:
    return lambda module, given, output: into.append(output.detach().clone())


def _router_logits(into: list[Tensor]) -> Callable[..., None]:
    return lambda router, given: into.append(F.linear(given[0].detach().float(), router.weight.detach().float()))
