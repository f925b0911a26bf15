"""The rules of adapters: which linears can have one, and what they cannot be combined with."""

from collections.abc import Iterator
from math import lcm
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.adapter import adapted, adapts
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import Fault, fault_at, multiples_around, required
from titan_hydra.core.job.config.operation import LOADED
from titan_hydra.core.job.config.registry import ADAPTERS
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import SIZE
from titan_hydra.core.job.ranks import sparse
from titan_hydra.core.job.run.checkpoints import find_section, find_weights, holds_adapters


def adapted_linears_exist(job: Job) -> Iterator[Fault]:
    """Every entry of adapter.linears names a linear of the family's blocks."""
    if not job.adapter.linears:
        return
    known = [linear.name for linear in family_of(job.model).linears(job.model)]
    if wrong := [name for name in job.adapter.linears if name not in known]:
        yield fault_at(job, "adapter.linears", f"{job.model.family} has no linear {wrong[0]}", f"[{','.join(known)}]")


def adapters_go_with_plain_weights(job: Job) -> Iterator[Fault]:
    """Adapters leave the weights as they are, so the weights must be plain and sharded by FSDP2."""
    if not adapts(job):
        return
    adapter = f"adapter={job.adapter.name}"
    yield from required(
        job,
        ("precision.converter", None, f"{adapter} needs plain linears"),
        ("parallelism.backend", "fsdp2", f"{adapter} has frozen weights, which this backend does not shard"),
        ("loss.name", "cross_entropy", f"it computes the gradient of the head, which {adapter} freezes"),
        ("fault_tolerance.name", "off", f"replica groups exchange all weights, and {adapter} trains only its own"),
        ("checkpoint.export_dtype", None, f"{adapter} is exported by titan checkpoint export"),
    )
    earlier = _earlier_adapters(job)
    if earlier is None and not set(job.checkpoint.exclude_from_loading) >= set(LOADED):
        yield fault_at(
            job,
            "checkpoint.exclude_from_loading",
            f"{adapter} takes its base from initial_load_path, and nothing else",
            f"[{','.join(LOADED)}]",
        )


def adapters_go_on_from_their_like(job: Job) -> Iterator[Fault]:
    """Weights in initial_load_path that are adapters alone are taken by equal adapters, and by nothing else."""
    if (earlier := _earlier_adapters(job)) is None:
        return
    path = job.checkpoint.initial_load_path
    if not adapts(job):
        reason = "holds adapters alone; titan checkpoint export writes their merged weights"
        yield Fault("checkpoint.initial_load_path", path, reason)
        return
    for key, here in vars(job.adapter).items():
        if (there := earlier.get(key, here)) != here:
            yield Fault(f"adapter.{key}", here, f"the adapters in {path} were trained with {there}", legal=(there,))


def _earlier_adapters(job: Job) -> dict[str, Any] | None:
    """Return the adapter section of the run whose adapters initial_load_path holds; None if it holds none."""
    try:
        weights = find_weights(job.checkpoint.initial_load_path) if job.checkpoint.initial_load_path else None
    except ConfigError:  # another rule says that there are no weights
        return None
    return find_section("adapter", weights)[1] if weights and holds_adapters(weights) else None


def adapters_of_experts_suit_the_job(job: Job) -> Iterator[Fault]:
    """A model whose experts get adapters has experts, and the adapters' rank suits torch's grouped matmul, whose rows are
    multiples of 16 bytes, and the ranks that share the experts of an ep rank.
    """
    config: Any = job.adapter
    if not adapts(job) or not getattr(config, "experts", False):
        return
    if not job.model.sparse or ADAPTERS[config.name].adapt_experts is None:
        yield fault_at(
            job, "adapter.experts", f"{job.model.family} has no experts that adapter={config.name} adapts", False
        )
        return
    step = 16 // SIZE[job.precision.compute_dtype]
    degrees = job.parallelism
    shards = degrees.dp_shard * degrees.cp * degrees.tp // degrees.ep
    if degrees.ep * degrees.tp > 1 and shards and sparse(job).n_experts // degrees.ep % shards:
        step = lcm(step, shards)  # FSDP then shards matrices of experts by their first width
    if config.rank % step:
        reason = f"adapters of experts need multiples of {step} on this layout"
        yield Fault("adapter.rank", config.rank, reason, legal=multiples_around(config.rank, step))


def adapted_linears_are_split(job: Job) -> Iterator[Fault]:
    """Tensor parallelism splits every linear with an adapter: adapters know row and column linears."""
    whole = [linear.name for linear in adapted(job) if linear.whole]
    if whole and job.parallelism.tp > 1:
        others = [linear.name for linear in family_of(job.model).linears(job.model) if not linear.whole]
        reason = f"with parallelism.tp={job.parallelism.tp} each rank computes all of {whole[0]}, and its adapter has no part"
        yield fault_at(job, "adapter.linears", reason, f"[{','.join(others)}]")


RULES = [
    adapted_linears_exist,
    adapters_go_with_plain_weights,
    adapters_go_on_from_their_like,
    adapters_of_experts_suit_the_job,
    adapted_linears_are_split,
]
