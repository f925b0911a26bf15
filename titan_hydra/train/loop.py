"""The training loop: build a job's model on this rank, train it, record it. Reads from the top down."""
from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from titan_hydra.base.errors import NotFinite, Stopped
from titan_hydra.base.run import Run, versions
from titan_hydra.checkpoint.checkpointer import Checkpointer
from titan_hydra.config import identity
from titan_hydra.config.files import read_json, write_text
from titan_hydra.config.rules.pipeline import Action
from titan_hydra.config.schema import Job
from titan_hydra.data.loader import Batch, Loader
from titan_hydra.fault_tolerance.replicas import Replicas
from titan_hydra.observe.metrics import Metrics
from titan_hydra.observe.probes import Probes
from titan_hydra.observe.profiling import Profiler
from titan_hydra.observe.watchdog import Watchdog
from titan_hydra.parallel.pipeline import Pipeline, actions_of_ranks

from .optimizer import set_lr
from .trainer import Trainer, build
from .world import GarbageCollection, refuse_stale, set_timeout, world

if TYPE_CHECKING:
    from titan_hydra.fault_tolerance.per_step import PerStep


def train(job: Job, run: Run) -> None:
    """Train a job to its last step on this rank, resuming from the run's newest complete checkpoint if there is one.

    Raises NotFinite, Stopped or CheckpointError on all ranks alike.
    """
    if job.comm.name == "fake":
        from titan_hydra.verify import fake

        fake.train(job, run)
        return
    with world(job, run) as device, Watchdog(job, run) as watch:
        trainer = build(job, device)
        watch.knows(trainer.mesh)
        trainer.progress = watch.moves
        replicas = None
        if job.fault_tolerance.name == "torchft":
            from titan_hydra.fault_tolerance.per_step import PerStep

            replicas = trainer.quorum = PerStep(job, run, trainer.masters.weights, trainer.optimizers, trainer.stop_requested)
        elif job.fault_tolerance.name != "off":
            replicas = Replicas(job, run, trainer.masters.weights, trainer.optimizers, trainer.stop_requested)
        checkpointer = Checkpointer(job.checkpoint, run, trainer.masters.weights, trainer.optimizers, replicas.tensors if replicas else {})
        start, data_state = checkpointer.resume()
        if data_state is None and job.checkpoint.initial_load_path:
            start, data_state = checkpointer.start_from(job.checkpoint.initial_load_path, job.model)
        first, ranks = run.replica * trainer.mesh.data_ranks, job.fault_tolerance.replicas * trainer.mesh.data_ranks
        loader = trainer.spec.build_data(job, first + trainer.mesh.data_rank, ranks)
        if data_state is not None:
            loader.load(data_state)
        if trainer.quorum is not None:
            trainer.quorum.data_ahead = loader.state()["step"] - start
        held_out = None
        if job.validation.name == "on":
            held_out = trainer.spec.build_data(job, trainer.mesh.data_rank, trainer.mesh.data_ranks, split="validation")
        listen(trainer)
        if replicas is not None:
            start, missed = replicas.begin(start, resumed=checkpointer.saved >= 0)
            if missed:
                raise Stopped("stopped before the first step")
        metrics = trainer.spec.metrics(job, run, device, start, trainer.spec.flops_per_token(job.model, job.data.seq_len))
        checkpointer.report = metrics.event
        if replicas is not None:
            replicas.report_to(metrics.event)
        if run.rank == 0:
            if isinstance(trainer.step, Pipeline):
                record_schedule(run.home / "schedule.json", actions_of_ranks(trainer.step.schedule, job))
            print("\n".join([start_line(job, trainer, start), *trainer.notes, *slow_formats(job, device)]), flush=True)
        try:
            loop(trainer, loader, held_out, checkpointer, metrics, replicas, watch, start)
            if job.checkpoint.export_dtype:
                checkpointer.save_weights(run.directory / "export", job.model, job.checkpoint.export_dtype)
            checkpointer.close()
            if run.rank == 0:
                result = metrics.result(job.steps)
                for directory in {run.directory, run.home if replicas and replicas.leads else run.directory}:
                    write_result(job, directory, result)
        finally:
            if replicas is not None:
                replicas.close()
            for source in (loader, held_out):
                if source is not None:
                    source.close()
            metrics.close()


def record_schedule(path: Path, ranks: list[list[Action]]) -> None:
    """Write the order in which every pipeline rank computes, for the report's timeline."""
    names = ("stage", "kind", "microbatch")
    content = {"ranks": [[dict(zip(names, action, strict=True)) for action in actions] for actions in ranks]}
    write_text(path, json.dumps(content) + "\n", durable=False)


def loop(
    trainer: Trainer, loader: Loader, held_out: Loader | None, checkpointer: Checkpointer, metrics: Metrics,
    replicas: Replicas | PerStep | None, watch: Watchdog, start: int,
) -> None:
    """Run the steps after `start`, up to the last."""
    job, clock = trainer.job, metrics.clock
    garbage, probes = GarbageCollection(job.train.gc_interval), Probes(job.debug, watch.run, trainer.model, trainer.masters.weights)
    profiler = Profiler(job.profiling, watch.run, trainer.device, metrics, watch)
    step, first, batch = start, True, None
    while step < job.steps:
        if trainer.quorum is not None:
            watch.at("meeting")
            step = trainer.quorum.before_step(step)
        step, missed = step + 1, False
        profiler.begins(step)
        clock.start()
        watch.at("data", step)
        batch = loader.next() if trainer.quorum is None else batch_of(step + trainer.quorum.data_ahead, loader, batch)
        clock.has_data()
        watch.at("forward, backward")
        lr = set_lr(trainer.optimizers, trainer.spec.lr_factor(step, job.steps, job.lr_scheduler))
        share = trainer.forward_backward(batch)
        probes.after_backward(step)
        agreement = trainer.agree(share, trainer.measure(), [*checkpointer.votes(), len(loader.news())])
        stop = None
        if trainer.quorum is not None:
            counts, stop = trainer.quorum.commits(agreement.read()[2])
            if not counts:
                checkpointer.wait_for_staging()  # the next quorum may replace the weights
                trainer.drop_gradients()
                step -= 1
                continue
        watch.at("optimizer")
        clock.leave_out(checkpointer.wait_for_staging())
        trainer.update(agreement)
        loss, grad_norm, asked, (*votes, bad_shards) = agreement.read()
        stop = asked if stop is None else stop
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            watch.at("checkpoint")
            checkpointer.land()  # complete the pending save: it is the last one with finite weights
            raise NotFinite(f"step {step}: loss {loss}, gradient norm {grad_norm}; the update was not made{probes.culprit()}")
        clock.stop()
        if bad_shards:
            report_bad_shards(loader, metrics, step)
        metrics.step(step, loss, grad_norm, lr)
        if replicas is not None:
            watch.at("meeting")
            step, missed = replicas.after_step(step, loss)
        if held_out is not None and (step % job.validation.interval == 0 or step == job.steps):
            watch.at("validation")
            validate(trainer, held_out, metrics, step)
        if stop or missed:
            refuse_stale(watch.run)
        watch.at("checkpoint")
        checkpointer.after_step(step, votes, loader.state(), step == job.steps, stop or missed)
        if missed or (stop and step < job.steps):
            saved = "its checkpoint is written" if checkpointer.on else "nothing is saved, as checkpoint=off"
            raise Stopped(f"stopped after step {step} of {job.steps}; {saved}")
        if first:
            set_timeout(job.comm.train_timeout_seconds)
            watch.settle(job.comm.train_timeout_seconds)
            first = False
        garbage.step(step)
    profiler.close()


def batch_of(step: int, loader: Loader, last: Batch | None) -> Batch:
    """Return batch number `step`. After catching up from another replica group this may be the batch just used (the step is repeated) or
    one further ahead (steps were skipped).
    """
    while last is None or loader.state()["step"] < step:
        last = loader.next()
    return last


def validate(trainer: Trainer, held_out: Loader, metrics: Metrics, step: int) -> None:
    """Measure held-out loss, always on the same samples, and record it with its own duration."""
    began = time.perf_counter()
    loss = trainer.validate(held_out, trainer.job.validation.steps)
    metrics.event("validation", step, validation_loss=loss, seconds=time.perf_counter() - began)
    report_bad_shards(held_out, metrics, step)


def report_bad_shards(loader: Loader, metrics: Metrics, step: int) -> None:
    """Report the shards that some rank has left out since the last report, once each. This is a collective."""
    parts: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, loader.news())
    news = dict(sorted((shard, reason) for part in parts for shard, reason in part.items()))
    for count, (shard, reason) in enumerate(news.items(), start=len(loader.told) + 1):
        metrics.event("bad_shard", step, bad_shards=count, shard=shard, reason=reason)
        if metrics.events:
            print(f"warning: a shard is left out: {reason}", flush=True)
    loader.hear(news)


def listen(trainer: Trainer) -> None:
    """Record SIGTERM and SIGUSR2 (Ctrl-C of the launcher, preemption); the ranks agree on the stop at the end of the next step.

    A forked child (a data loader's) inherits this handler and must ignore the signals.
    """
    rank = os.getpid()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda received, _: trainer.stop_requested.append(received) if os.getpid() == rank else None)


def start_line(job: Job, trainer: Trainer, start: int) -> str:
    """Format the first line of the log: the model, the devices, the batch and the steps."""
    groups = job.fault_tolerance.replicas
    accumulation = job.data.global_batch // (job.data.local_batch * trainer.mesh.data_ranks * groups)
    return (
        f"{job.model.name}: {trainer.parameters:,} parameters on {f'{groups} x ' * (groups > 1)}{dist.get_world_size()} x "
        f"{trainer.device.type}, {job.parallelism.name}, "
        f"{job.precision.name}; global batch {job.data.global_batch} ({accumulation} accumulation), sequence {job.data.seq_len}; "
        f"steps {start + 1} to {job.steps}"
    )


def slow_formats(job: Job, device: torch.device) -> list[str]:
    """Return a note for a CPU without bfloat16 instructions, which emulates them."""
    if device.type != "cpu" or job.precision.compute_dtype != "bfloat16":
        return []
    with contextlib.suppress(OSError):
        features = set(Path("/proc/cpuinfo").read_text().split())
        if not features & {"avx512_bf16", "amx_bf16", "bf16"}:
            return ["note: this CPU has no bfloat16 instructions and emulates them; precision=fp32 is faster here"]
    return []


def write_result(job: Job, directory: Path, measured: dict) -> None:
    """Write result.json, once the run is done."""
    overrides = (directory / "overrides.txt").read_text(errors="replace").splitlines() if (directory / "overrides.txt").exists() else []
    environment = read_json(directory / "env.json") or {}
    result = {"status": "done", "hash": identity(job), "name": job.name, "overrides": overrides} | measured
    result |= {"versions": versions(), "git_sha": environment.get("git_sha")}
    write_text(directory / "result.json", json.dumps(result, indent=2) + "\n")
