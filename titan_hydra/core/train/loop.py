"""The training loop: build a job's model on this rank, train it, and record the run. Read it from the top down."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from titan_hydra.core import data
from titan_hydra.core.base.amounts import time_of_day
from titan_hydra.core.base.errors import NotFinite, Stopped
from titan_hydra.core.base.threads import cores
from titan_hydra.core.checkpoint.carried import record_facts
from titan_hydra.core.checkpoint.checkpointer import Checkpointer
from titan_hydra.core.data.loader import Loader
from titan_hydra.core.data.shards import ROW
from titan_hydra.core.data.tasks import Task, load_tasks
from titan_hydra.core.job.batches import local_batches
from titan_hydra.core.job.config import to_dict
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.parametrization import rules_of
from titan_hydra.core.job.pipeline import Action
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.core.job.run.code import versions
from titan_hydra.core.job.run.inputs import data_signature
from titan_hydra.core.job.run.run import Run, hash_of
from titan_hydra.core.job.run.stretches import values_of_layout
from titan_hydra.core.parallel.compile import breaks_refused
from titan_hydra.core.train.observe.metrics import Metrics
from titan_hydra.core.train.observe.probes import Probes
from titan_hydra.core.train.observe.profiling import Profiler
from titan_hydra.core.train.observe.watchdog import Watchdog

from .groups import Groups
from .optimizer import lr_factor, set_lr
from .step import Plain
from .tasks import score_requests
from .trainer import Trainer, build
from .world import collect_garbage, refuse_stale, set_timeout, steady_timeout, world


def train(job: Job, run: Run, open_groups: Callable[[Trainer, Run, Watchdog], Groups] = lambda *_: Groups()) -> None:
    """Train a job to its last step on this rank, resuming from the run's newest complete checkpoint if there is one.

    Raises NotFinite, Stopped or CheckpointError on all ranks alike.
    """
    with contextlib.ExitStack() as opened:
        loop = _begin(job, run, open_groups, opened)
        if run.rank == 0:
            record_facts(run.home, to_dict(job))
        checkpointer = loop.checkpointer
        with breaks_refused(job):
            loop.run()
        if job.checkpoint.export_dtype:
            checkpointer.save_weights(
                layout.EXPORT.of(run.directory),
                {"model": job.model, "parametrization": job.parametrization},
                job.checkpoint.export_dtype,
            )
        checkpointer.close()
        if run.rank == 0:
            best = checkpoints.best(checkpointer.folder) if job.checkpoint.keep_best else None
            result = loop.metrics.result(job.steps) | {"best_checkpoint": best and best.name}
            for directory in {run.directory, run.home if loop.groups.leads else run.directory}:
                write_result(job, directory, hash_of(run.home), result)


def _begin(
    job: Job, run: Run, open_groups: Callable[[Trainer, Run, Watchdog], Groups], opened: contextlib.ExitStack
) -> Loop:
    """Build everything that the steps use, and load the state of the step to continue from. `opened` closes everything
    when it ends.
    """
    device, watch = opened.enter_context(world(job, run)), opened.enter_context(Watchdog(job, run))
    trainer = build(job, device)
    watch.set_mesh(trainer.mesh)
    trainer.progress = watch.moves
    groups = trainer.groups = opened.enter_context(contextlib.closing(open_groups(trainer, run, watch)))
    checkpointer = Checkpointer(job.checkpoint, run, trainer.masters.weights, trainer.optimizers, groups.tensors)
    start, data_state = checkpointer.resume()
    if data_state is None and job.checkpoint.initial_load_path:
        start, data_state = checkpointer.start_from(
            job.checkpoint.initial_load_path, job.model, rules_of(job.model, job.parametrization)
        )
    rank, ranks = trainer.mesh.data_rank, trainer.mesh.data_ranks
    loader = data.build(job, run.replica * ranks + rank, job.fault_tolerance.replicas * ranks)
    opened.enter_context(contextlib.closing(loader))
    loader.signature.update({} if "data" in job.launch.accept_changed else data_signature(run.home))
    if data_state is not None:
        loader.load(data_state)
    held_out, tasks = None, []
    if job.validation.name == "on":
        tasks = load_tasks(job)
        held_out = opened.enter_context(contextlib.closing(data.build(job, rank, ranks, split="validation")))
    listen(trainer)
    start, missed = groups.begin(start, loader.state()["step"], resumed=checkpointer.saved >= 0)
    if missed:
        watch.mark_stopped()
        raise Stopped("stopped before the first step")
    metrics = Metrics(job, run, device, start, trainer.parameters)
    opened.enter_context(contextlib.closing(metrics))
    checkpointer.report, checkpointer.leave_out = metrics.event, metrics.clock.leave_out
    groups.report_to(metrics.event)
    if layout.FIRST_CONFIG.of(run.home).exists():
        metrics.event("layout", start, **values_of_layout(job))
    if run.rank == 0:
        if not isinstance(trainer.step, Plain):
            from titan_hydra.core.parallel.pipeline import actions_of_ranks

            record_schedule(layout.SCHEDULE.of(run.home), actions_of_ranks(trainer.step.schedule, job))
        print(
            "\n".join(
                [start_line(job, trainer, start), *trainer.notes, *slow_formats(job, device), *few_cores(device)]
            ),
            flush=True,
        )
    return Loop(trainer, groups, loader, held_out, tasks, checkpointer, metrics, watch, start)


def record_schedule(path: Path, ranks: list[list[Action]]) -> None:
    """Write the order of each pipeline rank's computations to a file, for the report's timeline."""
    names = ("stage", "kind", "microbatch")
    content = {"ranks": [[dict(zip(names, action, strict=True)) for action in actions] for actions in ranks]}
    write_text(path, json.dumps(content) + "\n", durable=False)


class Loop:
    """The steps of a run on this rank, and everything that they use."""

    def __init__(
        self,
        trainer: Trainer,
        groups: Groups,
        loader: Loader,
        held_out: Loader | None,
        tasks: list[Task],
        checkpointer: Checkpointer,
        metrics: Metrics,
        watch: Watchdog,
        start: int,
    ) -> None:
        """Keep what `_begin` has built. `start` is the step to continue from."""
        self.trainer, self.groups, self.loader, self.held_out, self.tasks = trainer, groups, loader, held_out, tasks
        self.checkpointer, self.metrics, self.watch, self.start, self.job = (
            checkpointer,
            metrics,
            watch,
            start,
            trainer.job,
        )
        self.probes = Probes(self.job, watch.run, trainer.model, trainer.masters.weights)
        self.profiler = Profiler(self.job.profiling, watch.run, trainer.device, metrics, watch)
        self.settled = False  # whether the first step of this process, which may be slow, is done

    def run(self) -> None:
        """Run the steps after `start`, up to the last."""
        trainer, groups, watch, clock = self.trainer, self.groups, self.watch, self.metrics.clock
        collect_garbage(0, self.job.train.gc_interval)
        for step in groups.steps(self.start, self.job.steps):
            self.profiler.begins(step)
            clock.start()
            watch.at("data", step)
            batch = groups.batch(step, self.loader)
            clock.has_data()
            watch.at("forward, backward")
            lr = set_lr(trainer.optimizers, lr_factor(step, self.job.steps, self.job.lr_scheduler))
            share = trainer.forward_backward(batch)
            self.probes.after_backward(step)
            votes, times = self.checkpointer.votes(), self.metrics.own_times(step)
            agreement = trainer.agree(share, trainer.measure(), [len(self.loader.news()), *votes, *times])
            if not groups.commits(agreement):
                # the pending save must copy the weights first, as the next quorum may replace them
                self.checkpointer.wait_for_staging()
                trainer.drop_gradients()
                continue
            watch.at("optimizer")
            self.checkpointer.wait_for_staging()
            trainer.update(agreement)
            loss, norm, asked, (bad_shards, *sums) = agreement.read()
            end_of_times = len(votes) + len(times)
            votes, times, means = sums[: len(votes)], sums[len(votes) : end_of_times], sums[end_of_times:]
            self.refuse_non_finite(step, loss, norm)
            clock.stop()
            if bad_shards:
                with clock.leave_out():
                    report_bad_shards(self.loader, self.metrics, step)
            step_loss = None if agreement.empty else loss
            columns = {} if agreement.empty else trainer.objective.named(means)
            self.metrics.step(step, step_loss, norm, lr, times, columns, [trainer.balance, trainer.clip])
            for reason in trainer.objective.warnings_of_first_step(columns) if step == 1 and columns else ():
                self.metrics.event("warning", step, reason=reason)
            step, missed = groups.after_step(step, step_loss)
            self.save(step, votes, self.validate(step), stop=groups.stops(asked), missed=missed)
            self.settle()
            collect_garbage(step, self.job.train.gc_interval)
        self.profiler.close()

    def refuse_non_finite(self, step: int, loss: float, norm: float) -> None:
        """Raise NotFinite if loss or norm is not finite. First complete the pending save, which has finite weights."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.watch.at("checkpoint")
            self.checkpointer.finish_pending()
            raise NotFinite(
                f"step {step}: loss {loss}, gradient norm {norm}; the update was not made{self.probes.culprit()}"
            )

    def validate(self, step: int) -> float:
        """If a validation is due, measure the held-out loss (always on the same samples), answer the tasks, and record
        the numbers and the time taken. Return the loss; infinity if no validation is due.
        """
        config = self.job.validation
        every = config.interval or math.ceil(self.job.steps / 10)
        if self.held_out is None or (step % every and step != self.job.steps):
            return math.inf
        self.watch.at("validation")
        with self.metrics.clock.leave_out(), self.trainer.held_out_weights():
            began = time.perf_counter()
            loss, columns = self.trainer.validate(self.held_out, config.steps)
            self.metrics.event("validation", step, validation_loss=loss, **columns, seconds=time.perf_counter() - began)
            report_bad_shards(self.held_out, self.metrics, step)
            for task in self.tasks:
                began = time.perf_counter()
                numbers = task.results(score_requests(self.trainer, task.requests))
                self.metrics.event("task", step, task=task.name, **numbers, seconds=time.perf_counter() - began)
        return loss

    def save(self, step: int, votes: list[float], held_out: float, stop: bool, missed: bool) -> None:
        """Save if a checkpoint is due or the run is to stop; if it is to stop, raise Stopped. `missed` is whether the
        stop came before an exchange between replica groups that was due.
        """
        if stop or missed:
            refuse_stale(self.watch.run)
        self.watch.at("checkpoint")
        self.checkpointer.after_step(step, votes, self.loader.state(), step == self.job.steps, stop or missed, held_out)
        if missed or (stop and step < self.job.steps):
            saved = "its checkpoint is written" if self.checkpointer.on else "nothing is saved, as checkpoint=off"
            self.watch.mark_stopped()
            raise Stopped(f"stopped after step {step} of {self.job.steps}; {saved}")

    def settle(self) -> None:
        """After the first step, switch to the short time-outs."""
        if not self.settled:
            seconds = steady_timeout(self.job)
            with self.metrics.clock.leave_out():
                set_timeout(seconds)
                self.watch.settle(seconds)
            self.settled = True


def report_bad_shards(loader: Loader, metrics: Metrics, step: int) -> None:
    """Report each shard and row that a rank has left out since the last report. This is a collective."""
    parts: list[dict[str, str]] = [{}] * dist.get_world_size()
    dist.all_gather_object(parts, loader.news())
    news = dict(sorted((name, reason) for part in parts for name, reason in part.items()))
    for kind, is_row in (("shard", False), ("row", True)):
        known = sum(name.startswith(ROW) is is_row for name in loader.known)
        left_out = [(name.removeprefix(ROW), reason) for name, reason in news.items() if name.startswith(ROW) is is_row]
        for count, (name, reason) in enumerate(left_out, start=known + 1):
            metrics.event(f"bad_{kind}", step, **{f"bad_{kind}s": count, kind: name, "reason": reason})
            if metrics.events:
                print(f"warning: a {kind} is left out: {reason}", flush=True)
    loader.take_news(news)


def listen(trainer: Trainer) -> None:
    """From now on, record SIGTERM and SIGUSR2 (from Ctrl-C at the launcher, or preemption). The ranks agree on the stop
    at the end of the next step.

    A forked child (a data loader's) inherits this handler and must ignore the signals.
    """
    rank = os.getpid()
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(
            number, lambda received, _: trainer.stop_requested.append(received) if os.getpid() == rank else None
        )


def start_line(job: Job, trainer: Trainer, start: int) -> str:
    """Format the first line of the log: the model, the devices, the batch and the steps."""
    groups = job.fault_tolerance.replicas
    return (
        f"{time_of_day()}  "
        f"{job.model.name}: {trainer.parameters:,} parameters on {f'{groups} x ' * (groups > 1)}{dist.get_world_size()} x "
        f"{trainer.device.type}, {job.parallelism.name}, "
        f"{job.precision.name}; global batch {job.data.global_batch} ({local_batches(job)} accumulation), sequence {job.data.seq_len}; "
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


def few_cores(device: torch.device) -> list[str]:
    """Return a note for a rank with a GPU and less than four cores. The main thread and the threads of the backward, of
    NCCL, of gloo and of the data share these cores. SLURM's default is often one core.
    """
    available = cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type == "cpu" or available >= 4:
        return []
    return [
        f"note: {counted(available, 'core')} for each rank of this host, and a GPU is kept busy by four or more; on SLURM "
        "cluster.cpus_per_task asks for them"
    ]


def write_result(job: Job, directory: Path, hash: str, measured: dict) -> None:
    """Write result.json, once the run is done."""
    typed = layout.OVERRIDES.of(directory)
    overrides = typed.read_text(errors="replace").splitlines() if typed.exists() else []
    environment = layout.ENV.read(directory)
    result = {"status": "done", "hash": hash, "name": job.name, "overrides": overrides} | measured
    result |= {"versions": versions(), "git_sha": environment.get("git_sha")}
    result[layout.CHECKSUM] = layout.sum_of(result)
    write_text(layout.RESULT.of(directory), json.dumps(result, indent=2) + "\n")
