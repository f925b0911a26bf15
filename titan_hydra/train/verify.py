"""Proof that a layout learns what one process learns: the same losses, gradient norms and gradients as a one-process fp32 run.

The cases stand in acceptance.py, one line each. All cases of a size run in one set of gloo ranks, through the same `build` and
step as a training run.
"""
from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
import os
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_hydra.config import Job, compose_job, from_dict, to_dict
from titan_hydra.config.run import Run
from titan_hydra.models.init import local_offsets

from .acceptance import Case
from .data.loader import Batch
from .loss import IGNORED
from .optimizer import set_lr
from .trainer import Trainer, build
from .world import world

STEPS = 10
# A model of seconds with every feature that splits: grouped-query attention, several blocks, an uneven feed-forward width.
BASE = ("precision=fp32", "model.dim=64", "model.n_layers=4", "model.n_heads=8", "model.n_kv_heads=4", "model.multiple_of=32",
        "model.vocab_size=512", "data=synthetic", "data.seq_len=32", "data.global_batch=16", "lr_scheduler.warmup_steps=2",
        "optimizer.lr=2e-3", "checkpoint=off")


def job_of(case: Case, steps: int = STEPS) -> Job:
    """The layout's job."""
    return compose_job(*later_wins(*BASE, f"steps={steps}", *case.base, *case.overrides))


def reference_of(case: Case, steps: int = STEPS) -> Job:
    """The same job in one process, its global batch in one piece."""
    job = compose_job(*later_wins(*BASE, f"steps={steps}", *case.base, "parallelism=single"))
    job.data.local_batch = job.data.global_batch
    return job


def later_wins(*overrides: str) -> list[str]:
    """Overrides with one value a key: Hydra refuses a group that is chosen twice."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


@dataclass(frozen=True)
class Outcome:
    """How far a layout is from the reference: largest relative differences, and how many initial tensors differ in any bit."""

    case: Case
    loss: float
    norm: float
    gradients: float
    worst: str  # the parameter whose gradient is farthest off
    start: int
    drift: int  # parts of weights that ranks hold in copies, and whose copies differ in any bit after the last step

    @property
    def passed(self) -> bool:
        """Whether all differences are within the case's tolerances."""
        close = self.loss <= self.case.loss and self.norm <= self.case.norm and self.gradients <= self.case.gradients
        return close and self.start == self.drift == 0


@dataclass
class Trace:
    """What a run did: loss and gradient norm of each step, whole gradients of the first, whole weights before it, `Outcome.drift`."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]
    drift: int = 0


def trace(job: Job, device: torch.device, uneven_mask: bool = False) -> Trace:
    """Train a job for its steps, as `train` does, and keep what is compared. A collective; whole tensors are on every rank."""
    trainer = build(job, device)
    weights = _of_all_stages(trainer, lambda parameter: parameter.detach())
    loader = trainer.spec.build_data(job, trainer.mesh.data_rank, trainer.mesh.data_ranks)
    result = Trace([], [], {}, weights)
    for step in range(1, job.steps + 1):
        batch = loader.next()
        if uneven_mask:
            ignore_unevenly(batch, trainer)
        set_lr(trainer.optimizers, trainer.spec.lr_factor(step, job.steps, job.lr_scheduler))
        share = trainer.forward_backward(batch)
        if step == 1:
            result.gradients = _of_all_stages(trainer, lambda parameter: parameter.grad)
        loss, norm, *_ = trainer.agree(share, trainer.clip())
        trainer.update()
        result.losses.append(loss)
        result.norms.append(norm)
    loader.close()
    result.drift = drift(trainer)
    return result


def drift(trainer: Trainer) -> int:
    """How many parts of weights differ between the ranks that hold copies of them. A collective."""
    own = {}
    for name, parameter in trainer.model.named_parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        part = (name, tuple(local_offsets(parameter)), tuple(local.shape))
        own[part] = hashlib.sha256(local.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    values = defaultdict(set)
    for parts in everyone:
        for part, digest in parts.items():
            values[part].add(digest)
    return sum(len(digests) > 1 for digests in values.values())


def _of_all_stages(trainer: Trainer, value: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
    """A whole tensor for each parameter of the whole model, by name. A collective."""
    own = {name: _whole(value(parameter)).clone() for name, parameter in trainer.model.named_parameters()}
    if trainer.mesh.pipeline is None:
        return own
    parts: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size(trainer.mesh.pipeline)
    dist.all_gather_object(parts, own, group=trainer.mesh.pipeline)
    return {name: tensor for part in parts for name, tensor in part.items()}


def ignore_unevenly(batch: Batch, trainer: Trainer) -> None:
    """Ignore r * 17 % of the labels in the r-th quarter of the global batch, wherever its samples are."""
    total = trainer.job.data.global_batch
    first = trainer.mesh.data_rank * len(batch.labels)
    for row in range(len(batch.labels)):
        quarter = (first + row) * 4 // total
        batch.labels[row, : round(quarter * 0.17 * batch.labels.shape[1])] = IGNORED


def compare(case: Case, run: Trace, reference: Trace) -> Outcome:
    """Relative differences of a run from its reference."""
    off = {name: _relative(run.gradients[name], gradient) for name, gradient in reference.gradients.items()}
    worst = max(off, key=off.get)
    start = sum(not torch.equal(run.weights[name], weight) for name, weight in reference.weights.items())
    return Outcome(case, _largest(run.losses, reference.losses), _largest(run.norms, reference.norms), off[worst], worst, start, run.drift)


def verify(cases: Iterable[Case], steps: int = STEPS) -> list[Outcome]:
    """Run cases and their references, one set of processes for each number of ranks. Outcomes are in the order of the cases."""
    cases = list(cases)
    references: dict[str, tuple[Job, bool]] = {}
    by_ranks: dict[int, list[tuple[int, Job]]] = defaultdict(list)
    for number, case in enumerate(cases):
        references.setdefault(_key(case), (reference_of(case, steps), case.uneven_mask))
        job = job_of(case, steps)
        by_ranks[case.ranks].append((number, job))
    with tempfile.TemporaryDirectory() as folder:
        _spawn(1, _run_references, folder, [(key, mask, to_dict(job)) for key, (job, mask) in references.items()])
        for ranks, jobs in sorted(by_ranks.items()):
            _spawn(ranks, _run_cases, folder, [(number, cases[number], to_dict(job)) for number, job in jobs])
        outcomes = [json.loads((Path(folder) / f"outcome_{number}.json").read_text()) for number in range(len(cases))]
    return [Outcome(case=case, **outcome) for case, outcome in zip(cases, outcomes, strict=True)]


def _run_references(device: torch.device, folder: str, jobs: list[tuple[str, bool, dict]]) -> None:
    for key, mask, job in jobs:
        torch.save(dataclasses.asdict(trace(from_dict(Job, job), device, mask)), f"{folder}/{key}.pt")


def _run_cases(device: torch.device, folder: str, jobs: list[tuple[int, Case, dict]]) -> None:
    for number, case, job in jobs:
        try:
            run = trace(from_dict(Job, job), device, case.uneven_mask)
        except Exception as error:
            error.add_note(f"in the case {case.name}")
            raise
        torch.compiler.reset()  # blocks of another case are other blocks, and torch compiles the same code only so often
        if dist.get_rank() == 0:
            outcome = dataclasses.asdict(compare(case, run, Trace(**torch.load(f"{folder}/{_key(case)}.pt"))))
            del outcome["case"]
            Path(f"{folder}/outcome_{number}.json").write_text(json.dumps(outcome))
        dist.barrier()


class Crashed(RuntimeError):
    """A rank was ended by a signal: by somebody, for lack of memory, or by a fault in native code."""


def _spawn(ranks: int, function: Callable, folder: str, jobs: list) -> None:
    """Run `function(device, folder, jobs)` on so many gloo ranks.

    Raises Crashed if one was killed by a signal, else RuntimeError with the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["titan_hydra.train.verify"])  # torch is imported once, not once a rank
    store = tempfile.mktemp(dir=folder)
    processes = [context.Process(target=_rank, args=(rank, ranks, store, function, folder, jobs)) for rank in range(ranks)]
    for process in processes:
        process.start()
    failed = False
    for process in processes:  # a rank that fails takes the others with it, through the collectives' closed connections
        while process.is_alive() and not failed:
            process.join(0.2)
            failed = any(peer.exitcode not in (None, 0) for peer in processes)
    if failed:
        crashed = []
        for rank, process in enumerate(processes):
            process.join(2)
            if (process.exitcode or 0) < 0:
                crashed.append(f"rank {rank} was killed by signal {-process.exitcode}")
            process.kill()
        if crashed:
            raise Crashed(crashed[0])
        errors = sorted(Path(folder).glob("error_*"), key=lambda path: path.stat().st_mtime)
        raise RuntimeError(errors[0].read_text())


def _rank(rank: int, ranks: int, store: str, function: Callable, folder: str, jobs: list) -> None:
    torch.set_num_threads(1)
    run = Run(Path(folder), Path(folder), rank, rank, ranks, dist.FileStore(store, ranks))
    try:
        with world(from_dict(Job, jobs[0][-1]), run) as device:
            function(device, folder, jobs)
    except BaseException:
        Path(f"{folder}/error_{rank}").write_text(traceback.format_exc())
        os._exit(1)


def _key(case: Case) -> str:
    return hashlib.sha256(repr((case.base, case.uneven_mask)).encode()).hexdigest()[:16]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _relative(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value - reference).norm() / reference.norm().clamp(min=1e-30)).item()


def _largest(values: list[float], references: list[float]) -> float:
    return max(abs(value - reference) / abs(reference) for value, reference in zip(values, references, strict=True))
