"""The rules of models with experts: over which ranks experts are split, and which shapes their kernels accept."""

from __future__ import annotations

from collections.abc import Iterator

from titan_hydra.core.job.config.fault import Fault, fault_at, multiples_around, required
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import SIZE
from titan_hydra.core.job.ranks import expert_degrees, sparse


def dense_models_have_no_expert_ranks(job: Job) -> Iterator[Fault]:
    """`ep` splits experts and `debug.balance_experts` balances them, but a dense model has no experts."""
    family = job.model.family
    if job.parallelism.ep > 1 and not job.model.expert_count:
        yield from required(job, ("parallelism.ep", 1, f"{family} has no experts to split"))
    if not job.model.sparse:
        yield from required(job, ("debug.balance_experts", False, f"{family} has no router of this package"))


def experts_divide_over_their_ranks(job: Job) -> Iterator[Fault]:
    """Each ep rank holds the same number of whole experts. The ep ranks are the ranks of dp_shard x cp x tp."""
    degrees, ep = job.parallelism, job.parallelism.ep
    if ep == 1 or not (experts := job.model.expert_count):
        return
    ranks = degrees.dp_shard * degrees.cp * degrees.tp
    if ranks % ep:
        yield Fault(
            "parallelism.ep",
            ep,
            f"dp_shard x cp x tp = {ranks} cannot be divided by it",
            legal=expert_degrees(job, ranks),
        )
    elif experts % ep:
        yield Fault(
            "parallelism.ep", ep, f"{experts} experts cannot be split over it", legal=expert_degrees(job, ranks)
        )


def experts_divide_over_their_shards(job: Job) -> Iterator[Fault]:
    """FSDP shards the experts of an ep rank by expert if they divide evenly over the ranks that hold them, else by
    their widths.
    """
    if not job.model.sparse or job.parallelism.ep * job.parallelism.tp == 1:
        return
    degrees, model = job.parallelism, sparse(job)
    shards = degrees.dp_shard * degrees.cp * degrees.tp // degrees.ep
    # `shards` is 0 if ep is larger than the number of ranks, which another rule refuses
    if shards == 0 or model.n_experts // degrees.ep % shards == 0:
        return
    for key, width in (("model.expert_dim", model.expert_dim), ("model.dim", model.dim)):
        if width % shards:
            yield Fault(
                key,
                width,
                f"the experts of an ep rank are sharded over {shards} ranks by this width",
                legal=multiples_around(width, shards),
            )


def rows_of_experts_are_aligned(job: Job) -> Iterator[Fault]:
    """torch's grouped matmul needs rows whose size is a multiple of 16 bytes."""
    if not job.model.sparse:
        return
    step = 16 // SIZE[job.precision.compute_dtype]
    for key, width in (("model.expert_dim", sparse(job).expert_dim), ("model.dim", job.model.dim)):
        if width % step:
            yield Fault(
                key, width, f"experts need multiples of {step}, which are 16 bytes", legal=multiples_around(width, step)
            )


def tokens_of_experts_are_split(job: Job) -> Iterator[Fault]:
    """With tp, the tokens of experts are split over the sequence; otherwise each rank would compute all tokens."""
    if not job.model.sparse:
        return
    if job.parallelism.tp > 1 and not job.parallelism.sequence_parallel:
        yield Fault(
            "parallelism.sequence_parallel", False, "experts need tokens that are split over tp ranks", legal=(True,)
        )
    if job.parallelism.backend == "simple_fsdp" and job.parallelism.ep * job.parallelism.tp > 1:
        yield Fault(
            "parallelism.backend",
            "simple_fsdp",
            "gathers all parameters over the same ranks, and experts have their own under ep and tp",
            legal=("fsdp2",),
        )


def experts_are_trained_by_one_group(job: Job) -> Iterator[Fault]:
    """The bias of a balanced router depends on the tokens of all ranks. Replica groups that synchronize only every few
    steps would have different biases.
    """
    if job.model.sparse and job.fault_tolerance.name != "off":
        yield fault_at(job, "fault_tolerance.name", "replica groups do not share the loads of experts", "off")


def fake_experts_have_kernels(job: Job) -> Iterator[Fault]:
    """On tensors without data, torch supports its grouped matmul only in bfloat16."""
    if job.model.sparse and job.comm.name == "fake" and job.precision.compute_dtype != "bfloat16":
        yield fault_at(job, "precision.compute_dtype", "comm=fake computes experts only in bfloat16", "bfloat16")


LAYOUT = [experts_divide_over_their_ranks, experts_divide_over_their_shards, rows_of_experts_are_aligned]
RECIPE = [tokens_of_experts_are_split, experts_are_trained_by_one_group, fake_experts_have_kernels]
