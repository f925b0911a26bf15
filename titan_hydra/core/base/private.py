"""Private members of torch, torchao, Hydra and argparse that this package uses, each with the reason. No other
file names a private member.

A name is resolved only by `from titan_hydra.core.base.private import NAME`. So a login node imports no torch, and a rank
imports only what it uses. For a new release of a library, check this file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    import torch
    from torch import Tensor
    from torch.distributed.checkpoint.staging import DefaultStager
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard
    from torch.optim import Optimizer

SCHEDULES, RING = (
    "torch.distributed.pipelining.schedules",
    "torch.distributed.tensor.experimental._context_parallel._attention",
)
MEMBERS: dict[str, str | tuple[str, ...]] = {  # name here: its `module:member`, several if the releases differ
    # Hydra: the parser of its command line; two steps of composing, which are done once for all cells.
    "get_args_parser": "hydra._internal.utils:get_args_parser",
    "ConfigLoaderImpl": "hydra._internal.config_loader_impl:ConfigLoaderImpl",
    "apply_overrides": "hydra._internal.config_loader_impl:ConfigLoaderImpl._apply_overrides_to_config",
    # OmegaConf: its loader of YAML, which reads numbers otherwise than the standard one.
    "get_yaml_loader": "omegaconf._utils:get_yaml_loader",
    # Meshes: several dimensions joined to one, for FSDP over dp_shard x cp; two meshes joined to one, for HSDP.
    "flatten": "torch.distributed.device_mesh:DeviceMesh._flatten",
    "concatenate": "torch.distributed.device_mesh:DeviceMesh._concatenate",
    # Process groups: the list of all groups, and a function that changes their time-out after the first step (public in
    # torch 2.15).
    "process_groups": "torch.distributed.distributed_c10d:_world",
    "set_group_timeout": ("torch.distributed:set_timeout", "torch.distributed.distributed_c10d:_set_pg_timeout"),
    # One kernel for a list of tensors, as torch's own optimizers and clipping use.
    "foreach_copy": "torch:_foreach_copy_",
    "foreach_norm": "torch:_foreach_norm",
    "foreach_div": "torch:_foreach_div_",
    "foreach_add": "torch:_foreach_add_",
    # Compilation: the exception that is raised if a whole graph is required and the graph breaks.
    "GraphBreak": "torch._dynamo.exc:Unsupported",
    # Pipelines: schedules from a user's csv file, their actions, and an order without backwards for validation.
    "Action": f"{SCHEDULES}:_Action",
    "ComputationType": f"{SCHEDULES}:_ComputationType",
    "PipelineSchedule": f"{SCHEDULES}:_PipelineSchedule",
    "PipelineScheduleRuntime": f"{SCHEDULES}:_PipelineScheduleRuntime",
    "load_csv": f"{SCHEDULES}:_PipelineScheduleRuntime._load_csv",
    # Ring attention is torch's. Its public switch is a context manager, which cannot span a step.
    "ring_options": f"{RING}:_cp_options",
    "ring_kernels": f"{RING}:custom_ops",
    "set_rotate_method": f"{RING}:set_rotate_method",
    "enable_ring_dispatcher": f"{RING}:_enable_context_parallel_dispatcher",
    "disable_ring_dispatcher": f"{RING}:_disable_context_parallel_dispatcher",
    # Ring attention on CPUs: the operators of its kernels, the registration of an operator in DTensor, the ring's loops.
    "ring_forward": f"{RING}:_templated_ring_attention",
    "ring_backward": f"{RING}:_templated_ring_attention_backward",
    "flash_on_cpu": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu.default",
    "flash_on_cpu_backward": "torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default",
    # Packed documents: the kernels of scaled_dot_product_attention, which itself takes no offsets of documents.
    "flash_attention": "torch:ops.aten._flash_attention_forward.default",
    "flash_attention_backward": "torch:ops.aten._flash_attention_backward.default",
    "OpOverload": "torch._ops:OpOverload",
    "OpSchema": "torch.distributed.tensor._op_schema:OpSchema",
    "OpStrategy": "torch.distributed.tensor._op_schema:OpStrategy",
    "RuntimeSchemaInfo": "torch.distributed.tensor._op_schema:RuntimeSchemaInfo",
    "op_dispatcher": "torch.distributed.tensor:DTensor._op_dispatcher",
    "expand_to_full_mesh_op_strategy": "torch.distributed.tensor._ops.utils:expand_to_full_mesh_op_strategy",
    "register_op_strategy": "torch.distributed.tensor._ops.utils:register_op_strategy",
    # Ulysses: an all-to-all that has a gradient and that a compiler can trace. Experts: an all-to-all without gradient.
    # Activation checkpointing can save the result of the second one; saving the result of the first one would leak
    # memory (TorchTitan #1467).
    "all_to_all_single_autograd": "torch.distributed._functional_collectives:all_to_all_single_autograd",
    "all_to_all_single": "torch.distributed._functional_collectives:all_to_all_single",
    "wait_tensor": "torch.distributed._functional_collectives:wait_tensor",
    # QK-clip: an all-gather that a compiler can trace, under its names since torch 2.13 and before.
    "all_gather_single": (
        "torch.distributed._functional_collectives:all_gather_single",
        "torch.distributed._functional_collectives:all_gather_tensor",
    ),
    # The matrix of layouts: the module whose function sums DTensors over ranks, to record the dtype of each sum.
    "functional_collectives": "torch.distributed._functional_collectives",
    # SimpleFSDP: a tensor-parallel weight sharded once more on the same dimension has no public placement.
    "StridedShard": "torch.distributed.tensor.placement_types:_StridedShard",
    # Activation checkpointing: the compiler's memory budget, and the names of all operators, for did-you-mean.
    "functorch_config": "torch._functorch.config",
    "operator_names": "torch._C:_dispatch_get_all_op_names",
    # MXFP8: torchao's matmul, whose backward has two matmuls. torchao 0.17 moved this function.
    "mxfp8_matmul": (
        "torchao.prototype.moe_training.mxfp8_linear:_to_mxfp8_then_scaled_mm",
        "torchao.prototype.mx_formats.mx_linear:_to_mxfp8_then_scaled_mm",
    ),
    # MXFP8: torchao's product of groups of rows, and whether its wheel has the kernels for it.
    "mxfp8_grouped_matmul": "torchao.prototype.moe_training.mxfp8_grouped_mm:_to_mxfp8_then_scaled_grouped_mm",
    "mxfp8_kernels": "torchao.prototype.moe_training.mxfp8_grouped_mm:_SM100_KERNELS_AVAILABLE",
    # Float8: the matmul with a scale for each row of both matrices.
    "scaled_mm": "torch:_scaled_mm",
    # Muon: two functions of torch's own optimizer, which are applied to sharded matrices here.
    "muon_adjust_lr": "torch.optim._muon:_adjust_lr",
    "muon_orthogonalize": "torch.optim._muon:_zeropower_via_newtonschulz",
    # A checkpoint's index is a pickle of these and other classes. set_element puts a value into a nested dict.
    "MemoryFormat": "torch.distributed.checkpoint.metadata:_MEM_FORMAT_ENCODING",
    "StorageInfo": "torch.distributed.checkpoint.filesystem:_StorageInfo",
    "get_layout": "torch.serialization:_get_layout",
    "set_element": "torch.distributed.checkpoint._nested_dict:set_element",
    # Debugging: whether a forward is a recomputation inside a backward; CUDA's history of allocations.
    "current_graph_task": "torch._C:_current_graph_task_id",
    "record_memory_history": "torch.cuda.memory:_record_memory_history",
    "memory_snapshot": "torch.cuda.memory:_snapshot",
    "dump_memory_snapshot": "torch.cuda.memory:_dump_snapshot",
    # CUDA's allocator: a change of its settings after the process has started.
    "set_allocator": "torch:_C._accelerator_setAllocatorSettings",
    # The fake world: tensors without data, and a store that answers for all ranks.
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    "clear_sharding_caches": "torch.distributed.tensor.debug:_clear_sharding_prop_cache",
    "FakeStore": "torch.testing._internal.distributed.fake_pg:FakeStore",
    # The tracker of the fake world: a mode that sees every operator, and the tensors in nested arguments.
    "TorchDispatchMode": "torch.utils._python_dispatch:TorchDispatchMode",
    "tree_leaves": "torch.utils._pytree:tree_leaves",
}


def __getattr__(name: str) -> Any:
    """Resolve a name of MEMBERS. Raises ImportError if this release of the library has none of its members."""
    if name not in MEMBERS:
        raise AttributeError(f"{__name__} has no {name}")
    members = MEMBERS[name]
    for address in [members] if isinstance(members, str) else members:
        module, _, path = address.partition(":")
        try:
            module_object = importlib.import_module(module)
            globals()[name] = attrgetter(path)(module_object) if path else module_object
            return globals()[name]
        except (ImportError, AttributeError) as error:
            missing = error
    raise ImportError(f"{members}: not in this release ({missing})") from missing


@contextlib.contextmanager
def threaded_groups(meet: Callable[[Any, Any, int, Any], None]) -> Iterator[None]:
    """While the block runs, give each thread its own process groups, of the kind that torch's tests use. Instead of
    waiting, a collective calls `meet(collective, group, rank in the group, data)`; the collective's `work` computes the
    results.
    """
    from torch._C import _distributed_c10d as c10d
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    class Handle:
        def __init__(self, collective: Any, group: Any):
            self.collective, self.group = collective, group

        def join(self, rank: int, data: Any) -> Any:
            meet(self.collective, self.group, rank, data)
            return threaded.ret_work(data)

    if not hasattr(threaded.ThreadLocalWorld, "comms"):  # torch 2.11 cannot destroy the world without this list
        threaded.ThreadLocalWorld.comms = []  # type: ignore[assignment]
    with (
        mock.patch.object(threaded.ProcessLocalGroup, "_start_coll", Handle),
        mock.patch.object(threaded.ProcessLocalGroup, "_end_coll", lambda *_: None),
        # the barrier would wait for other threads, but only this thread may run now
        mock.patch.object(threaded, "_store_based_barrier", lambda *_: None),
    ):
        threaded._install_threaded_pg()
        c10d._set_thread_isolation_mode(True)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            c10d._set_thread_isolation_mode(False)  # type: ignore[attr-defined]
            threaded._uninstall_threaded_pg()


def private_handlers(dispatcher: Any) -> dict[Any, Any]:
    """Return the handlers of operators in DTensor's dispatcher, which `loss_parallel` adds and removes."""
    return dispatcher._custom_op_handlers


def flight_recorders() -> list[Callable[[bool, bool, bool], bytes]]:
    """Return torch's flight recorders, one for each back end; a torch that is built without CUDA has only gloo's."""
    from torch._C import _distributed_c10d as c10d

    return [getattr(c10d, name) for name in ("_dump_fr_trace", "_dump_nccl_trace") if hasattr(c10d, name)]


def wrap_stage_messages(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap, once, the function that exchanges tensors between pipeline stages, because torch's recorder for gloo
    records only collectives.
    """
    from torch.distributed.pipelining import schedules

    if not hasattr(schedules._batch_p2p, "wrapped"):
        schedules._batch_p2p = wrap(schedules._batch_p2p)
        schedules._batch_p2p.wrapped = True  # type: ignore[attr-defined]  # our own mark on a function


def settle_shapes(schedule: Any) -> None:
    """Skip the vote by which the stages of torch 2.13 agree that they know their shapes, as fake tensors hold no votes."""
    if hasattr(schedule, "_warmup_p2p"):
        from torch.distributed.pipelining._utils import InferenceMode

        def settled(stages: list[Any], *_: bool) -> None:
            for stage in stages:
                stage._inference_mode = InferenceMode.STATIC

        schedule._warmup_p2p = settled


def placed_on(mesh: DeviceMesh) -> Callable[[Shard], Any] | None:
    """Return a function from a Shard to FSDP2's placement of a parameter on `mesh`; None if this torch has one mesh for
    all parameters of a module.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_common as fsdp

    if not hasattr(fsdp, "ShardPlacementResult"):
        return None
    info = (
        fsdp.FSDPMeshInfo(mesh, shard_mesh_dim=0)
        if mesh.ndim == 1
        else fsdp.HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    )
    return lambda placement: fsdp.ShardPlacementResult(placement, info)


def keep_gradients_in(dtype: torch.dtype, module: Any) -> None:
    """Make FSDP2 leave a module's gradients in `dtype`. By default it uses the weights' dtype at the first forward."""
    state = module._get_fsdp_state()
    # FSDP2's groups of parameters: a list in torch 2.13, a single group in torch 2.11.
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        if group is None:
            continue

        def learn(group: Any = group, learn: Callable[[], None] = group._init_mp_dtypes) -> None:
            learn()
            group._orig_dtype = dtype

        group._init_mp_dtypes = learn


def swap_propagation(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    """Change the function in which DTensor runs an operator at its global shape, to learn the shape of the result.
    Return a function that undoes the change.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    original = ShardingPropagator._propagate_tensor_meta_non_cached
    ShardingPropagator._propagate_tensor_meta_non_cached = change(original)
    return lambda: setattr(ShardingPropagator, original.__name__, original)


def forget_forward(stage: Any, microbatch: int) -> None:
    """Delete what torch's pipeline stage saves in a forward without backward; torch 2.15 renamed the attribute."""
    if hasattr(stage, "fwd_cache"):
        stage.fwd_cache[microbatch] = ((), [])
        return
    chunk = stage._forward_chunk_states[microbatch]
    chunk.live_outputs.clear()
    chunk.input_values.clear()


def holds_sent(stage: Any) -> bool:
    """Whether torch's pipeline stage keeps each output until the next step, after sending it. torch 2.15 releases it."""
    return hasattr(stage, "fwd_cache")


@contextlib.contextmanager
def composing_once() -> Iterator[None]:
    """Let hydra.main compose a command line once. It composes it a first time to look for hydra.mode, and chooses by -m if
    there is none.
    """
    from hydra._internal.hydra import Hydra

    with mock.patch.object(Hydra, "get_mode", lambda *_, **__: None):
        yield


def constant_when_compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the compiler call a function once, while it traces, and treat the result as a constant. The public function,
    torch.compiler.assume_constant_result, would import the compiler, which would add a second to each start.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def set_async_tp(on: bool) -> None:
    """Let the compiler split matmuls next to collectives, so that it can overlap them."""
    import torch._inductor.config

    torch._inductor.config._micro_pipeline_tp = on


def share_memory(group_name: Any) -> None:
    """Let the GPUs of a process group read each other's memory, as async tensor parallelism does. Releases that
    deprecate the function enable symmetric memory for every group anyway.
    """
    from torch.distributed import _symmetric_memory as memory

    if not hasattr(memory.enable_symm_mem_for_group, "__deprecated__"):
        memory.enable_symm_mem_for_group(group_name)


def join_collectives(size: int) -> None:
    """Let the compiler join a graph's all-gathers, and its reductions, into messages of up to `size` MiB, and start
    each of them early if this does not increase peak memory. If `size` is 0, do neither. The compiler's passes are
    those that torch's configuration recommends.
    """
    import torch._inductor.config as inductor

    inductor.bucket_all_gathers_fx = inductor.bucket_reduce_scatters_fx = "all" if size else "none"
    # This is not a lambda, because the compiler's cache on disk pickles its options.
    inductor.bucket_all_gathers_fx_bucket_size_determinator = partial(_same, size)
    inductor.bucket_reduce_scatters_fx_bucket_size_determinator = partial(_same, size)
    inductor.reorder_for_compute_comm_overlap = bool(size)
    early = "reorder_communication_preserving_peak_memory"
    inductor.reorder_for_compute_comm_overlap_passes = [early, "sink_waits_iterative", early] if size else []


def _same(size: int, index: int) -> int:
    return size


def scales_gradients(optimizer: Optimizer) -> bool:
    """Whether an optimizer divides gradients by `grad_scale` in its own pass, as torch's fused optimizers do for
    GradScaler.
    """
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def without_wrapper(local: Tensor) -> Tensor | None:
    """Return the plain tensor in torchao's wrapper for FSDP's Float8 gather; None if there is no wrapper."""
    return getattr(local, "_tensor", None)


def keep_staged(stager: DefaultStager) -> None:
    """Let a checkpoint's stager copy into the same memory at every save. torch 2.11 would pin new memory each time."""
    stager._state_dict_stager.close = lambda: None


def staging_executor(stager: DefaultStager) -> ThreadPoolExecutor:
    """Return the executor of the thread in which a checkpoint's stager copies."""
    return stager._staging_executor


def options_of(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments of a parser, for shell completion."""
    return parser._actions


def initialize_part(model: Any, part: Any, buffers_alone: bool = False) -> None:
    """Let a model of Hugging Face's library initialize one of its modules. With `buffers_alone`, parameters stay as they
    are.
    """
    for parameter in part.parameters(recurse=False) if buffers_alone else ():
        parameter._is_hf_initialized = True
    model._init_weights(part)


def attention_of(model: Any) -> str:
    """Return the name of the attention function that a model of Hugging Face's library uses."""
    name: str = model.config._attn_implementation
    return name


def choose_attention(model: Any, name: str) -> None:
    """Let a model of Hugging Face's library use the attention function of this name."""
    model.config._attn_implementation = name
