"""The least memory that a job takes, computed from its configuration alone, and the rule that refuses what cannot fit.

The memory is a lower bound. It counts the parameters and the optimizer's moments, and the larger of two: the gradients,
which the backward fills while it frees activations, and of the activations each block's input and the logits. On the
host, it counts one batch.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from titan_hydra.core.base.threads import cores
from titan_hydra.core.job.adapter import adapter_parameters
from titan_hydra.core.job.batches import local_batches, microbatch_size
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import Fault, counted, fault_at
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.registry import states_per_parameter
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import GIB, SIZE, gradient_dtype
from titan_hydra.core.job.ranks import devices_here, processes, runs_here

PROCESS = 0.25 * GIB  # memory of a rank before it has a model: Python and torch
PROCESSES_PER_CORE = 8  # limit without GPUs: more processes would exceed every time-out


def _elsewhere(job: Job) -> str:
    plan = f"titan plan model={job.model.name} gpus={max(processes(job), 8)} hardware=h100"
    return f"start it on a cluster (cluster=slurm), plan it without a GPU ({plan})"


def _parameters(model: Model) -> int | None:
    """Count the parameters of a model; None if its family needs torch to count them."""
    count = family_of(model).parameters
    return count(model) if count else None


def of_a_rank(job: Job) -> dict[str, float]:
    """Return the minimum bytes that a rank takes, by the key that determines each part of them. The bytes under
    data.global_batch are on the host, all others on the device.
    """
    layout, model, stored, used = (
        job.parallelism,
        job.model,
        SIZE[job.precision.param_dtype],
        SIZE[job.precision.compute_dtype],
    )
    moments, gradient = states_per_parameter(job.optimizer), SIZE[gradient_dtype(job)]
    ranks, whole, adapters = (
        layout.dp_shard * layout.cp * layout.tp * layout.pp,
        _parameters(model) or 0,
        adapter_parameters(job),
    )
    tokens = microbatch_size(job) * job.data.seq_len / layout.cp / layout.tp
    logits = model.vocab_size if job.loss.name == "cross_entropy" else 0
    gradients = adapters * stored if adapters else whole * gradient
    activations = tokens * (model.n_layers / layout.pp * model.dim + logits) * used
    if local_batches(job) == 1:  # later local batches add to gradients that exist
        gradients, activations = (gradients, 0) if gradients / ranks > activations else (0, activations)
    lasting = adapters * stored * (1 + moments) + whole * used if adapters else whole * stored * (1 + moments)
    return {
        "model.name": (lasting + gradients) / ranks,
        "data.local_batch": activations,
        "data.global_batch": local_batches(job) * job.data.local_batch * job.data.seq_len * 16,
    }


def of_this_machine() -> int:
    """Return the bytes of memory that processes may use here: the memory of the machine, or the container's limit if
    that is lower.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total


def ranks_fit_the_memory(job: Job) -> Iterator[Fault]:
    """A job must fit into memory. Otherwise it would fail minutes later, as the machine swaps or the kernel kills a
    process.
    """
    needs, ranks = of_a_rank(job), processes(job)
    if job.cluster.device_memory_gib:
        del needs["data.global_batch"]
        yield from _too_much(job, needs, 1, job.cluster.device_memory_gib * GIB, "a device")
    elif runs_here(job) and not devices_here():
        available = cores()
        most = max(PROCESSES_PER_CORE * available, 16)
        if ranks > most and not job.cluster.gpus_per_node:
            legal = (most // job.fault_tolerance.replicas,)
            yield fault_at(
                job,
                "gpus",
                f"{ranks:,} processes, but this machine has {counted(available, 'core')}; {_elsewhere(job)}",
                *legal,
            )
        else:
            yield from _too_much(job, needs | {"gpus": PROCESS}, ranks, of_this_machine(), "this machine")


def cells_side_by_side_fit(job: Job) -> Iterator[Fault]:
    """Without devices, as many cells of this size as may run at once fit into the memory and on the cores together."""
    at_once, ranks = job.cluster.max_parallel, processes(job)
    if at_once < 2 or not runs_here(job) or devices_here():
        return
    size, most = ranks * (sum(of_a_rank(job).values()) + PROCESS), max(PROCESSES_PER_CORE * cores(), 16)
    legal = (max(min(int(of_this_machine() / size), most // ranks), 1),)
    if at_once * size > of_this_machine():
        reason = (
            f"so many cells take at least {_gib(at_once * size)} GiB, and this machine has {_gib(of_this_machine())}"
        )
        yield Fault("cluster.max_parallel", at_once, reason, legal)
    elif at_once * ranks > most:
        reason = f"so many cells are {at_once * ranks:,} processes, but this machine has {counted(cores(), 'core')}"
        yield Fault("cluster.max_parallel", at_once, reason, legal)


def _too_much(job: Job, needs: dict[str, float], ranks: int, room: float, where: str) -> Iterator[Fault]:
    """Yield a fault if `ranks` processes need more than `room` bytes. It names the key that takes most of the
    memory.
    """
    if ranks * sum(needs.values()) <= room:
        return
    key = max(needs, key=needs.__getitem__)
    what = {
        "model.name": f"{_parameters(job.model) or 0:,} parameters and what the optimizer needs for them take",
        "data.local_batch": "block inputs and logits take",
        "data.global_batch": "tokens and labels of one step take",
        "gpus": f"{ranks:,} processes take",
    }[key]
    value = {"model.name": job.model.name, "gpus": job.gpus}.get(key) or getattr(job.data, key.partition(".")[2])
    way = _elsewhere(job) if where == "this machine" else "shard it over more GPUs"
    further = f"; {way}, or choose a smaller model=" if key == "model.name" else ""
    yield Fault(
        key,
        value,
        f"{what} at least {_gib(ranks * needs[key])} GiB, and {where} has {_gib(room)}{further}",
    )


def _gib(size: float) -> str:
    return f"{size / GIB:,.1f}" if size >= GIB else f"{size / GIB:.2g}"
