"""`comm=fake`: build and step one rank of any world in this process, without other ranks, without a GPU and with almost
no memory.

The code is the same as in training: mesh, pipeline split, parallelization, schedule, collectives, optimizer. Tensors
have shapes but no data (FakeTensorMode) and collectives return at once (torch's fake process group), so that a layout
for 512 GPUs is checked on a laptop in a minute.
"""

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from titan_hydra.core.base.amounts import in_bytes
from titan_hydra.core.base.private import FakeStore, FakeTensorMode, clear_sharding_caches, settle_shapes
from titan_hydra.core.base.text import table
from titan_hydra.core.data.batch import Batch
from titan_hydra.core.job.batches import local_batches
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import GIB
from titan_hydra.core.job.ranks import world_size
from titan_hydra.core.job.run.run import Run, hash_of
from titan_hydra.core.parallel.pipeline import Pipeline
from titan_hydra.core.train.loop import write_result
from titan_hydra.core.train.tracker import Counted, counting
from titan_hydra.core.train.trainer import Trainer, assemble
from titan_hydra.core.train.world import set_determinism

Watch = Callable[[Trainer, Batch], AbstractContextManager]
CPU = torch.device("cpu")


def train_fake(job: Job, run: Run) -> None:
    """Run one step as rank `comm.rank` of the job's world, and print what the rank holds and what it sends."""
    began, counts = time.perf_counter(), list[Counted]()
    with fake_world(job):
        trainer = fake_step(job, counting(counts))
        # Parameters of this rank's pipeline stages, before sharding.
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        seconds = time.perf_counter() - began
        print(
            f"{job.model.name}: {trainer.parameters:,} parameters, {parameters:,} of them in the stages of rank {job.comm.rank} "
            f"of {world_size(job)}; a step of {job.parallelism.name} in {seconds:.1f} s, with nothing computed",
            *_shown(job, counts[0]),
            sep="\n",
            flush=True,
        )
        counted = {
            "held_gib": {name: size / GIB for name, size in counts[0].held.items()} | {"peak": counts[0].live / GIB},
            "sent_gib": {name: size / GIB for name, size in counts[0].messages.items()},
            "messages": counts[0].calls,
        }
        write_result(
            job,
            run.directory,
            hash_of(run.home),
            {
                "steps": 1,
                "final_loss": None,
                "validation_loss": None,
                "tokens_per_second": None,
                "tokens_per_second_iqr": None,
                "measured_steps": 0,
                "memory_gib": None,
                "mfu": None,
                "seconds": seconds,
                "gpu_hours": None,
                "world_size": world_size(job),
                "parameters": parameters,
                "counted": counted,
            },
        )


def _shown(job: Job, counted: Counted) -> list[str]:
    """Return lines with the bytes that a rank holds, and with those that it sends along each dimension of the mesh."""
    held = ", ".join(f"{name} {in_bytes(size)}" for name, size in counted.held.items())
    how = "eager" if job.precision.converter is None else "eager, and its number format is emulated"
    sizes = vars(job.parallelism) | {"fsdp": job.parallelism.dp_shard * job.parallelism.cp}
    rows = [
        (name, sizes.get(name, "-"), f"{counted.calls[name]:,}", in_bytes(size))
        for name, size in sorted(counted.messages.items(), key=lambda item: -item[1])
    ]
    titles = ("sent in a step", "ranks", "messages", "bytes")
    return [
        f"held: {held}; all tensors at the peak {in_bytes(counted.live)} (the step is {how})",
        *(table(titles, rows, titles[1:]) if rows else ["sent in a step: nothing"]),
    ]


@contextmanager
def fake_world(job: Job) -> Iterator[None]:
    """Make this process rank `comm.rank` of the job's world while the block runs.

    Clear DTensor's caches at the end: they hold this world's meshes, and a rank forked later would find its equal mesh
    there, with this rank's coordinates, and draw the initial weights of a wrong shard.
    """
    set_determinism(job)
    dist.init_process_group("fake", store=FakeStore(), rank=job.comm.rank, world_size=world_size(job))
    try:
        yield
    finally:
        dist.destroy_process_group()
        clear_sharding_caches()


def fake_step(job: Job, watch: Watch | None = None, device: torch.device = CPU) -> Trainer:
    """Return this rank's trainer after one step. The step runs in the context `watch(trainer, batch)`. Call this
    function inside `fake_world`.

    Settings that only choose kernels are switched off, as no kernel runs: compilation, async TP and, on a CPU, native
    number formats. All experts get equally many tokens, as routers have no scores. A CUDA `device` must be a pretended
    device (tests/pretended_cuda), as autograd aborts a process whose torch has no CUDA. A real device gets no data.
    """
    job = copy.deepcopy(job)
    job.compile.name, job.parallelism.async_tp = "off", False
    if device.type == "cpu":
        job.precision.emulate, job.debug.balance_experts = (
            job.precision.converter is not None,
            job.model.expert_count > 0,
        )
    parts = assemble(job, device)  # outside FakeTensorMode, in which meshes would be fake too
    with FakeTensorMode(allow_non_fake_inputs=True):
        for stage in parts.stages:
            stage.to_empty(device=device)
        trainer = parts.trainer(device)
        if isinstance(trainer.step, Pipeline):
            settle_shapes(trainer.step.schedule)
        samples = job.data.local_batch * local_batches(job)
        batch = trainer.objective.example(samples).each(lambda tensor, dims: torch.zeros_like(tensor))
        with watch(trainer, batch) if watch else nullcontext():
            share = trainer.forward_backward(batch)
            trainer.update(trainer.agree(share, trainer.measure()))
    return trainer
