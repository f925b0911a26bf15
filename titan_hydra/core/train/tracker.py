"""Count what a rank of the fake world holds and sends: the bytes of live storages, and messages along each dimension of
the mesh.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_hydra.core.base.private import TorchDispatchMode, swap_propagation, tree_leaves
from titan_hydra.core.data.batch import Batch
from titan_hydra.core.parallel.mesh import Mesh, local_part
from titan_hydra.core.parallel.split_masters import is_split, lower_half
from titan_hydra.core.train.trainer import Trainer

BOTH = "fsdp and ep"  # a group of ranks that exchanges rows of experts and shards all other weights, too
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")


@dataclass(frozen=True)
class Counted:
    """What a rank holds and sends in a step, in bytes. `live` is the peak of all tensors; `held` has its weights with
    buffers, the gradients and the optimizer's state. `messages` and `calls` are the bytes and the number of messages
    along each dimension of the mesh.
    """

    live: float
    held: dict[str, float]
    messages: dict[str, float]
    calls: dict[str, float]


class MemoryTracker(TorchDispatchMode):
    """Counts live bytes, their peak, and the bytes of messages while `tracking`.

    It sees the operators on local tensors, below DTensor. A message has the size of a collective's input or result,
    whichever is larger.
    """

    def __init__(self, mesh: Mesh):
        """Begin with nothing held. While `paused`, operators and messages are not counted."""
        super().__init__()
        self.live = self.peak = 0
        self.messages: Counter[str] = Counter()  # bytes along each dimension of the mesh
        self.calls: Counter[str] = Counter()  # their number
        self.sizes: dict[int, int] = {}  # bytes of each live storage, by the id of its Python object
        self.groups = _names_of_groups(mesh)
        self.paused = False

    def hold(self, tensor: Tensor) -> None:
        """Count a tensor's storage until it is freed. A meta tensor has no storage."""
        local = local_part(tensor)
        # unwraps the result of an asynchronous collective that has not been waited for
        local = getattr(local, "elem", local)
        if local.device.type != "meta":
            storage = local.untyped_storage()
            if id(storage) not in self.sizes:
                weakref.finalize(storage, self.resize, id(storage), 0)
            self.resize(id(storage), storage.nbytes())

    def resize(self, key: int, size: int) -> None:
        """Count a storage with a new size in bytes; 0 if it is freed."""
        self.live += size - self.sizes.pop(key, 0)
        self.peak = max(self.peak, self.live)
        if size:
            self.sizes[key] = size

    def restart(self) -> int:
        """Return the peak so far, and reset it to the bytes that are live now."""
        peak, self.peak = self.peak, self.live
        return peak

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        """Run an operator, and count its message, if it is a collective, and the storages of its result."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # not counted here: DTensor calls the operator again with local tensors
        result = operator(*args, **(kwargs or {}))
        if not self.paused:
            if operator.namespace in COLLECTIVES:
                self.count(str(operator), tree_leaves((args, kwargs, result)))
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor):
                    self.hold(leaf)
        return result

    def count(self, operator: str, leaves: list) -> None:
        """Count a collective by its arguments and results. An operator without a process group, such as a wait, is no
        collective.
        """
        for dimension in {self.groups[name] for leaf in leaves if (name := _name_of_group(leaf)) in self.groups}:
            if dimension == BOTH:
                dimension = "ep" if "all_to_all" in operator or "alltoall" in operator else "fsdp"
            self.calls[dimension] += 1
            self.messages[dimension] += max(
                leaf.numel() * leaf.element_size() for leaf in leaves if isinstance(leaf, Tensor)
            )


def _names_of_groups(mesh: Mesh) -> dict[str, str]:
    """Return the mesh dimension of each process group, by the group's name; `fsdp` stands for dp_shard x cp."""
    names = {}
    if mesh.fsdp is not None:
        shards, *replicas = reversed(
            [str(mesh.fsdp.get_group(dimension).group_name) for dimension in range(mesh.fsdp.ndim)]
        )
        names = {shards: "fsdp"} | dict.fromkeys(replicas, "dp_replicate")
    dimensions = mesh.world.mesh_dim_names if mesh.world is not None else ()
    if mesh.experts is not None:
        for dimension_of_experts, name in (("efsdp", "fsdp"), ("ep", "ep")):
            if dimension_of_experts in mesh.experts.mesh_dim_names:
                group = str(mesh.experts.get_group(dimension_of_experts).group_name)
                names[group] = BOTH if name == "ep" and names.get(group) == "fsdp" else name
    return {str(mesh.world.get_group(name).group_name): name for name in dimensions} | names


def _name_of_group(leaf: Any) -> str | None:
    """Return the name of a process group if an argument of a collective is a group or a name, else None."""
    if isinstance(leaf, torch.ScriptObject) and "ProcessGroup" in str(leaf):
        return dist.ProcessGroup.unbox(leaf).group_name
    return leaf if isinstance(leaf, str) else None


def counting(counts: list[Counted]) -> Callable[[Trainer, Batch], AbstractContextManager]:
    """Return a `watch` for `fake_step` that adds to `counts` what the step holds and sends. The optimizer creates its
    state only at the end of this step, but the state is counted from the beginning, as it is in memory during all later
    steps.
    """

    @contextmanager
    def watch(trainer: Trainer, batch: Batch) -> Iterator[None]:
        """Count one step of a trainer: what it holds before, the peak until the update, the gradients then, and the
        peak after.
        """
        tracker = MemoryTracker(trainer.mesh)
        parameters = [*trainer.model.parameters(), *trainer.masters.weights.parameters()]
        weights = _held(tracker, [*parameters, *trainer.model.buffers()])
        # the optimizer of split masters creates its state when it is built
        early_state = _held(tracker, _state_of_split_masters(trainer))
        _held(tracker, batch.tensors.values())
        before_step = tracker.live
        peaks, gradients = [], []

        def before_update(*_: Any) -> None:
            peaks.append(tracker.restart())
            sizes = {id(p): local_part(p.grad).nbytes for p in parameters if p.grad is not None}  # each gradient once
            gradients.append(sum(sizes.values()))

        trainer.optimizers[0].register_step_pre_hook(before_update)
        with tracking(tracker):
            yield
        late_state = tracker.live - before_step
        held: dict[str, float] = {
            "weights": weights,
            "gradients": gradients[0],
            "optimizer": early_state + late_state,
        }
        peak = max(peaks[0] + late_state, tracker.peak)
        counts.append(Counted(peak, held, dict(tracker.messages), dict(tracker.calls)))

    return watch


def _state_of_split_masters(trainer: Trainer) -> Iterator[Tensor]:
    """Yield the lower halves of split masters and the state of their optimizer; nothing if no parameter is split."""
    for parameter in trainer.model.parameters():
        if is_split(parameter):
            yield lower_half(parameter)
            yield from trainer.optimizers[0].state[parameter].values()


def _held(tracker: MemoryTracker, tensors: Iterable[Tensor]) -> int:
    """Count tensors, and return the bytes that they add."""
    before = tracker.live
    for tensor in tensors:
        tracker.hold(tensor)
    return tracker.live - before


@contextmanager
def tracking(tracker: MemoryTracker) -> Iterator[None]:
    """Let a tracker count while the block runs.

    Operators that DTensor runs on global shapes, to infer a result's shape, do not count. FSDP frees gathered weights
    with `resize_` of a storage, which is not an operator and is therefore patched. Norms are computed in one kernel, as
    on CUDA; torch's norms on a CPU would keep float32 copies of their input.
    """

    def unseen(original: Callable) -> Callable:
        """Wrap a function of torch so that what it does inside is not counted."""

        def propagate(*args: Any) -> Any:
            tracker.paused = True
            try:
                return original(*args)
            finally:
                tracker.paused = False

        return propagate

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        done = resize(storage, size)
        tracker.resize(id(storage), size)
        return done

    resize, norm, undo = torch.UntypedStorage.resize_, F.rms_norm, swap_propagation(unseen)
    torch.UntypedStorage.resize_, F.rms_norm = resized, _rms_norm  # type: ignore[assignment]
    try:
        with tracker:
            yield
    finally:
        torch.UntypedStorage.resize_, F.rms_norm = resize, norm
        undo()


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float | None = None) -> Tensor:
    """Return a tensor with the shape of F.rms_norm's result. It saves for the backward what CUDA's kernel saves."""
    return _Norm.apply(x, weight)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)
