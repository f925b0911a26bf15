"""Rules of torch.compile and of activation checkpointing together with it."""

import re
from collections.abc import Iterator
from importlib.metadata import entry_points

from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.registry import CP_ROTATIONS
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.recomputation import mode_of, recomputed_share
from titan_hydra.core.job.run.code import versions

# back ends of torch.compile
BACKENDS = ("inductor", "eager", "aot_eager", "aot_eager_decomp_partition", "cudagraphs", "openxla", "tvm")


def compiler_is_one_that_torch_knows(job: Job) -> Iterator[Fault]:
    """A torch.compile back end is torch's own, announced by an installed package, or registered by a user's module."""
    name = job.compile.backend
    if job.compile.name == "off" or name in BACKENDS or job.train.imports:
        return
    announced = {point.name for point in entry_points(group="torch_dynamo_backends")}
    if name not in announced:
        yield Fault("compile.backend", name, "torch has no such back end", legal=(*BACKENDS, *sorted(announced)))


def async_tensor_parallel_is_the_compilers(job: Job) -> Iterator[Fault]:
    """With async_tp, the compiler overlaps the all-gathers and reduce-scatters of sequence parallelism with matmuls.
    Without a compiler, async_tp does nothing.
    """
    if not job.parallelism.async_tp:
        return
    if job.compile.name != "block":
        yield fault_at(job, "compile.name", "parallelism.async_tp=true needs the compiler", "block")
    if not job.parallelism.sequence_parallel or job.parallelism.tp == 1:
        yield fault_at(
            job,
            "parallelism.async_tp",
            "has nothing to overlap without tp ranks and parallelism.sequence_parallel",
            False,
        )


def memory_budget_is_the_compilers(job: Job) -> Iterator[Fault]:
    """With a memory budget, the compiler chooses the activations to keep when it splits forward from backward."""
    if mode_of(job).budget and job.compile.name != "block":
        yield fault_at(job, "compile.name", f"ac={job.ac.name} needs the compiler", "block")


def inputs_in_the_hosts_memory_are_those_of_a_block(job: Job) -> Iterator[Fault]:
    """The code of a whole model saves the inputs of blocks by itself, before they could be copied to the host."""
    if mode_of(job).host and job.compile.name == "model":
        yield fault_at(job, "compile.name", f"ac={job.ac.name} copies what blocks save, one block at a time", "block")


def a_whole_model_is_one_graph(job: Job) -> Iterator[Fault]:
    """compile=model needs one graph of the whole model. So communication must be part of it (SimpleFSDP), and no shape may
    depend on values (as with experts).
    """
    if job.compile.name != "model":
        return
    layout = job.parallelism
    why = (
        "FSDP2 gathers in hooks, parallelism.backend=simple_fsdp in the graph"
        if layout.backend != "simple_fsdp"
        else f"experts of {job.model.family} depend on values"
        if job.model.sparse
        else next((f"not proven with {name} ranks" for name in ("pp", "cp", "tp") if getattr(layout, name) > 1), None)
    )
    if why:
        yield Fault("compile.name", "model", why, legal=("block",))


def a_compiled_ring_has_two_ranks(job: Job) -> Iterator[Fault]:
    """In a compiled backward, ranks of a ring of three or more wait for different exchanges, and the run hangs (seen with
    the back ends aot_eager and inductor, torch 2.13, gloo). Only the ring that gathers all keys at once is excepted.
    """
    rotation = CP_ROTATIONS[job.parallelism.cp_rotate]
    if (
        job.parallelism.cp > 2
        and rotation.ring
        and not rotation.gathers
        and job.compile.name != "off"
        and job.comm.name != "fake"
    ):
        yield fault_at(
            job,
            "parallelism.cp_rotate",
            f"compile={job.compile.name}: a compiled ring of {job.parallelism.cp} ranks hangs in the backward; compile=off can keep it",
            *tuple(name for name, other in CP_ROTATIONS.items() if not other.ring or other.gathers),
        )


def compiled_tensor_parallel_blocks_save_tensors(job: Job) -> Iterator[Fault]:
    """torch 2.13 cannot compile the recomputation of blocks with tensor parallelism: it puts the mesh among the saved tensors of
    the recomputation, and asserts that all of them are tensors. torch 2.11 can compile them. With comm=fake nothing is
    compiled, so these layouts, which the TorchTitan paper has, are accepted.
    """
    compiled = job.compile.name == "block" and job.comm.name != "fake"
    if (
        job.parallelism.tp > 1
        and compiled
        and recomputed_share(job)
        and not mode_of(job).host
        and not versions().get("torch", "").startswith("2.11.")
    ):
        yield fault_at(
            job, "ac.name", "this torch cannot compile it together with tensor parallelism", "op", "lean", "none"
        )


def saved_operators_are_names(job: Job) -> Iterator[Fault]:
    """The operators to save have names of the right form. Whether torch has them is known only when a rank starts."""
    chosen: list[str] = getattr(job.ac, "save_ops", [])
    for name in chosen:
        if not re.fullmatch(r"\w+\.\w+(\.\w+)?", name):
            yield Fault(
                "ac.save_ops", chosen, f"{name} is not an operator's name", legal=("aten.mm", "aten.max.default")
            )


RECIPE = [
    async_tensor_parallel_is_the_compilers,
    memory_budget_is_the_compilers,
    inputs_in_the_hosts_memory_are_those_of_a_block,
    a_whole_model_is_one_graph,
    a_compiled_ring_has_two_ranks,
    compiled_tensor_parallel_blocks_save_tensors,
    saved_operators_are_names,
]
