"""The generalized training loop: build a job's model on this rank, train it, record it. Reads from the top down."""
from __future__ import annotations

import json
import math
import signal
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from titan_hydra import parallel
from titan_hydra.config import identity
from titan_hydra.config.files import write_text
from titan_hydra.config.run import Run, versions
from titan_hydra.config.schema import Job
from titan_hydra.config.status import NotFinite, Stopped
from titan_hydra.models.init import init_weights
from titan_hydra.parallel import context as context_parallel
from titan_hydra.parallel import converters
from titan_hydra.parallel import tensor as tensor_parallel
from titan_hydra.parallel.gradients import clip_gradients
from titan_hydra.parallel.mesh import Mesh
from titan_hydra.parallel.pipeline import Pipeline
from titan_hydra.parallel.stages import whole

from .checkpoint import Checkpointer
from .data.loader import Batch, Loader
from .loss import IGNORED, TARGETS_IN_FORWARD
from .metrics import Metrics
from .optimizer import set_lr
from .spec import TrainSpec, spec_of
from .step import Plain, build_step
from .world import GarbageCollection, set_timeout, world


@dataclass
class Trainer:
    """What a step needs. `build` makes one; the equivalence harness steps it just as `train` does."""

    job: Job
    spec: TrainSpec
    mesh: Mesh
    device: torch.device
    model: nn.Module  # all that this rank holds, under the plain names
    step: Plain | Pipeline
    optimizers: list[torch.optim.Optimizer]
    parameters: int  # of the whole model, over all ranks
    notes: list[str] = field(default_factory=list)  # what was done to the model, for the log
    stop_requested: list[int] = field(default_factory=list)  # signals received

    def forward_backward(self, batch: Batch) -> torch.Tensor:
        """Gradients of one global batch, from this rank's samples of it. Returns this rank's share of the mean loss.

        The loss is the sum over all tokens that count, divided by their number over the whole global batch, counted once
        before the first microbatch: true under accumulation and uneven masks alike.
        """
        tokens = (batch.labels != IGNORED).sum().to(self.device)
        if self.mesh.batch is not None:
            dist.all_reduce(tokens, group=self.mesh.batch)
        tokens = tokens.clamp(min=1)
        total = torch.zeros((), device=self.device)
        parts = batch.split(self.job.data.local_batch)
        for number, part in enumerate(parts, start=1):
            inputs, labels, context = self.prepare(part)
            with tensor_parallel.loss_context(self.mesh):
                total += self.step.forward_backward(inputs, labels, tokens, last=number == len(parts), **context)
        return total

    def prepare(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
        """Inputs and labels of a local batch on this rank's device, and by name what else the model's forward needs."""
        batch = context_parallel.shard_batch(batch, self.mesh).to(self.device)
        context = {"positions": batch.positions, "documents": batch.documents}
        if self.job.loss.name in TARGETS_IN_FORWARD:
            context["targets"] = batch.labels
        return batch.tokens, batch.labels, {name: value for name, value in context.items() if value is not None}

    def clip(self) -> torch.Tensor:
        """Clip the whole model's gradient; returns its norm before that."""
        return clip_gradients(self.model.parameters(), self.job.optimizer.max_norm, self.mesh.pipeline)

    def agree(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> tuple[float, float, bool]:
        """The loss over all ranks, the norm, and whether any rank was asked to stop: the step's one synchronization."""
        share = loss.double() if self.mesh.reports_loss else torch.zeros_like(loss, dtype=torch.float64)
        values = torch.stack([share, torch.tensor(float(bool(self.stop_requested)), dtype=torch.float64, device=self.device)])
        dist.all_reduce(values)
        return values[0].item(), grad_norm.item(), values[1].item() > 0

    def update(self) -> None:
        """Take the optimizer's step and drop the gradients."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        converters.after_step(self.model, self.job)

    @torch.no_grad()
    def validate(self, loader: Loader, steps: int) -> float:
        """Mean loss over `steps` held-out global batches, in which every token counts once, whatever the layout."""
        self.model.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.device)
        loader.rewind()
        for _ in range(steps):
            for part in loader.next().split(self.job.data.local_batch):
                inputs, labels, context = self.prepare(part)
                with tensor_parallel.loss_context(self.mesh):
                    loss = self.step.forward(inputs, labels, **context)
                if self.mesh.reports_loss and self.step.has_loss:
                    totals += torch.stack([loss.double(), (labels != IGNORED).sum().double()])
        dist.all_reduce(totals)
        self.model.train()
        return (totals[0] / totals[1].clamp(min=1)).item()


@dataclass
class Parts:
    """A rank's stages on the meta device, parallelized, and what a Trainer needs beside them."""

    job: Job
    spec: TrainSpec
    mesh: Mesh
    stages: list[nn.Module]
    parameters: int
    notes: list[str]

    def trainer(self, device: torch.device) -> Trainer:
        """The trainer, once the stages have their memory."""
        job, model = self.job, whole(self.stages).train()
        step = build_step(self.stages, self.mesh, job, device, self.spec.losses[job.loss.name])
        optimizers = self.spec.optimizers(model, job.optimizer)
        return Trainer(job, self.spec, self.mesh, device, model, step, optimizers, self.parameters, self.notes)


def assemble(job: Job, device: torch.device) -> Parts:
    """This rank's part of the model, split and parallelized, as shapes without memory: nothing is ever held whole."""
    spec = spec_of(job)
    mesh = parallel.build_mesh(job.parallelism, device.type)
    with torch.device("meta"):
        model = spec.model(job.model, job.data.seq_len)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    model.to(getattr(torch, job.precision.param_dtype))
    notes = converters.convert(model, job, mesh, device)
    stages = spec.pipeline(model, mesh, job)  # [model] without pipeline parallelism
    for stage in stages:
        spec.parallelize(stage, mesh, job)
    return Parts(job, spec, mesh, stages, parameters, notes)


def build(job: Job, device: torch.device) -> Trainer:
    """This rank's part of the model in memory, with its initial values, and its optimizers."""
    parts = assemble(job, device)
    for stage in parts.stages:
        stage.to_empty(device=device)
        init_weights(stage, job.model, job.seed)
    return parts.trainer(device)


def train(job: Job, run: Run) -> None:
    """Train a job to its last step on this rank, resuming from the newest complete checkpoint of the run if there is one.

    Raises NotFinite, Stopped or CheckpointError on all ranks alike.
    """
    if job.comm.name == "fake":
        from . import fake  # which imports this module

        fake.train(job, run)
        return
    with world(job, run) as device:
        trainer = build(job, device)
        checkpointer = Checkpointer(job.checkpoint, run, trainer.model, trainer.optimizers)
        start, data_state = checkpointer.resume()
        if start == 0 and job.checkpoint.initial_load_path:
            checkpointer.load_weights(job.checkpoint.initial_load_path)
        loader = trainer.spec.build_data(job, trainer.mesh.data_rank, trainer.mesh.data_ranks)
        if data_state is not None:
            loader.load(data_state)
        held_out = None
        if job.validation.name == "on":
            held_out = trainer.spec.build_data(job, trainer.mesh.data_rank, trainer.mesh.data_ranks, split="validation")
        metrics = trainer.spec.metrics(job, run, device, start, trainer.spec.flops_per_token(job.model, job.data.seq_len))
        listen(trainer)
        if run.rank == 0:
            print("\n".join([start_line(job, trainer, start), *trainer.notes]), flush=True)
        try:
            loss = loop(trainer, loader, held_out, checkpointer, metrics, run, start)
            if run.rank == 0:
                write_result(job, run, metrics.result(job.steps, loss))
        finally:
            for source in (loader, held_out):
                if source is not None:
                    source.close()
            metrics.close()


def loop(
    trainer: Trainer, loader: Loader, held_out: Loader | None, checkpointer: Checkpointer, metrics: Metrics, run: Run, start: int,
) -> float | None:
    """The steps after `start`, up to the last. Returns the last step's loss."""
    job, clock, loss = trainer.job, metrics.clock, None
    garbage = GarbageCollection(job.train.gc_interval)
    for step in range(start + 1, job.steps + 1):
        clock.start()
        batch = loader.next()
        clock.has_data()
        lr = set_lr(trainer.optimizers, trainer.spec.lr_factor(step, job.steps, job.lr_scheduler))
        share = trainer.forward_backward(batch)
        loss, grad_norm, stop = trainer.agree(share, trainer.clip())
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            raise NotFinite(f"step {step}: loss {loss}, gradient norm {grad_norm}; the update was not made")
        trainer.update()
        clock.stop()
        if metrics.due(step):
            metrics.record(step, loss, grad_norm, lr)
        heartbeat(run, step)
        last = step == job.steps or stop
        if held_out is not None and (step % job.validation.interval == 0 or step == job.steps):
            validate(trainer, held_out, metrics, step)
        if checkpointer.due(step, last):
            metrics.event("checkpoint", step, seconds=checkpointer.save(step, loader.state()))
        if stop and step < job.steps:
            saved = "its checkpoint is written" if checkpointer.due(step, last) else "nothing is saved, as checkpoint=off"
            raise Stopped(f"stopped after step {step} of {job.steps}; {saved}")
        if step == start + 1:
            set_timeout(job.comm.train_timeout_seconds, [trainer.mesh.batch, trainer.mesh.loss, trainer.mesh.pipeline])
        garbage.step(step)
    return loss


def validate(trainer: Trainer, held_out: Loader, metrics: Metrics, step: int) -> None:
    """Measure held-out loss, always on the same samples, and record it with its own time."""
    began = time.perf_counter()
    loss = trainer.validate(held_out, trainer.job.validation.steps)
    metrics.event("validation", step, validation_loss=loss, seconds=time.perf_counter() - began)


def listen(trainer: Trainer) -> None:
    """Note SIGTERM and SIGUSR2 (Ctrl-C of the launcher, preemption); the ranks agree on it at the next step's end."""
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda received, frame: trainer.stop_requested.append(received))


def heartbeat(run: Run, step: int) -> None:
    """Say where the run is, for those who watch it from outside."""
    if run.rank == 0:
        write_text(run.attempt / "status.json", json.dumps({"step": step, "time": time.time()}), durable=False)


def start_line(job: Job, trainer: Trainer, start: int) -> str:
    """What is trained, on what, from where: the first line a person wants to see."""
    accumulation = job.data.global_batch // (job.data.local_batch * trainer.mesh.data_ranks)
    return (
        f"{job.model.name}: {trainer.parameters:,} parameters on {dist.get_world_size()} x {trainer.device.type}, {job.parallelism.name}, "
        f"{job.precision.name}; global batch {job.data.global_batch} ({accumulation} accumulation), sequence {job.data.seq_len}; "
        f"steps {start + 1} to {job.steps}"
    )


def write_result(job: Job, run: Run, measured: dict) -> None:
    """result.json: the run's last word, written once it is done."""
    overrides = (run.directory / "overrides.txt").read_text().splitlines() if (run.directory / "overrides.txt").exists() else []
    environment = json.loads((run.directory / "env.json").read_text()) if (run.directory / "env.json").exists() else {}
    result = {"status": "done", "hash": identity(job), "name": job.name, "overrides": overrides} | measured
    result |= {"versions": versions(), "git_sha": environment.get("git_sha")}
    write_text(run.directory / "result.json", json.dumps(result, indent=2) + "\n")
