"""Record what one step of one rank does on the pretended device, and find faults in it."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.pretended_cuda import streams
from tests.pretended_cuda.streams import place

CUDNN_BACKWARD = ("grad_out", "query", "key", "value", "out")  # the first arguments of cuDNN's backward
KERNELS = {  # operators in the table of a layout, with their names there
    "_scaled_dot_product_cudnn_attention": "cudnn attention",
    "_scaled_dot_product_flash_attention": "flash attention",
    "_scaled_dot_product_efficient_attention": "efficient attention",
    "_safe_softmax": "math attention",
    "attend_documents": "flash attention of documents",
    "_grouped_mm": "grouped_mm",
    "grouped_matmul": "grouped_mm",
    "sent_grouped_matmul": "grouped_mm",
    "_scaled_mm": "scaled_mm",
    "_scaled_grouped_mm": "scaled_grouped_mm",
}
# Operators for which the host waits, because it needs their result or the size of the result.
DYNAMIC = ("nonzero", "masked_select", "unique", "_unique2", "unique_consecutive", "unique_dim", "equal", "bincount")
COLLECTIVE = re.compile(r"^(c10d|_c10d_functional)\.")


@dataclass
class Record:
    """The record of one rank's step. It can be written as JSON."""

    faults: list[str] = field(default_factory=list)
    # "what at place": number of times that the host waited for the device
    waits: Counter = field(default_factory=Counter)
    copies: Counter = field(default_factory=Counter)  # "to the device at place": number of pinned copies
    # "on the host of file": largest number of bytes at once of tensors that copies between host and device read or wrote
    held: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # layer: attention, products, casts
    # key of cuDNN's cache: strides of out and grad_out
    cudnn: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    collectives: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # group: operators in order
    # "sender>receiver side": tensors in order
    messages: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


class Recorder(TorchDispatchMode):
    """See every operator on plain tensors. `answers` has the values that the host reads from the device at known
    places.
    """

    def __init__(self, names, answers=()):
        super().__init__()
        self.record, self.names, self.answers, self.inside = (
            Record(),
            names,
            {place: number for place, number, _ in answers},
            [],
        )
        self.memory = streams.Memory(self.record.faults)
        self.held = streams.Held(self.memory, self.record.held)

    def __enter__(self):
        streams.WAITS.clear()
        self.hooks = [
            register_module_forward_pre_hook(lambda module, _: self.inside.append(module)),
            register_module_forward_hook(lambda *_: self.inside.pop() and None, always_call=True),
        ]
        FakeTensor.tolist = lambda tensor: self.tolist(tensor)
        return super().__enter__()

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        self.record.waits.update(f"{what} at {where}" for what, where in streams.WAITS)
        return super().__exit__(*error)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op.namespace in ("prim", "profiler"):
            return op(*args, **kwargs)
        if any(hasattr(kind, "__tensor_flatten__") or kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # a wrapper: its inner tensors come here again
        namespace, name = op.namespace, op._schema.name.partition("::")[2]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_device = [tensor for tensor in inputs if tensor.is_cuda]
        if name == "_local_scalar_dense":
            return self.read("item", inputs[0])
        if on_device and name in DYNAMIC:
            self.wait(name)
        if COLLECTIVE.match(f"{namespace}."):
            self.collective(name, args, kwargs)
        elif on_device:
            self.devices(name, inputs)
        if name == "_scaled_dot_product_cudnn_attention_backward":
            self.strides(dict(zip(CUDNN_BACKWARD, args, strict=False)))
        out = op(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.kernel(name, inputs, outputs)
        self.copy(name, args, outputs, kwargs)
        if not op.is_view and any(tensor.is_cuda for tensor in [*inputs, *outputs]):
            changed = [x for x in changed_by(op, args) if x.is_cuda]
            self.memory.kernel(
                op, on_device, [*changed, *(x for x in outputs if x.is_cuda and not any(x is y for y in inputs))]
            )
        self.held.measure()
        return out

    def state(self, tensors):
        """Record parameters and buffers that are not on the device."""
        self.record.faults += [
            f"a parameter or buffer of shape {list(tensor.shape)} is on the {tensor.device}"
            for tensor in tensors
            if tensor.device.type != "cuda"
        ]

    def layer(self):
        """Return the innermost module that is running, with * for the number of its block."""
        name = next((self.names[module] for module in reversed(self.inside) if module in self.names), "")
        return re.sub(r"\b\d+\b", "*", name) or "-"

    def wait(self, what):
        self.record.waits[f"{what} at {place()}"] += 1

    def read(self, what, tensor):
        """Return the value that the host reads for each element: 1 from a host tensor; from a device tensor the answer
        of the place that reads, or 1 if the place is not known.
        """
        if not tensor.is_cuda:
            return 1
        self.wait(what)
        return self.answers.get(place(), 1)

    def tolist(self, tensor):
        """Return nested lists of one number in the tensor's shape: torch's own `tolist` copies the tensor to the host
        at once.
        """
        number = self.read("tolist", tensor)

        def nested(shape):
            return [nested(shape[1:]) for _ in range(shape[0])] if shape else number

        return nested(tensor.shape)

    def devices(self, name, inputs):
        """Record a host tensor of more than one element in an operator on the device."""
        if name not in ("copy_", "_foreach_copy_") and (
            wrong := [x for x in inputs if x.device.type == "cpu" and x.dim()]
        ):
            self.record.faults.append(f"{name} takes a host tensor of shape {list(wrong[0].shape)} at {place()}")

    def strides(self, inputs):
        """Record the strides in cuDNN's backward. A graph is looked up by q, k and v, but was built for the strides of
        out and grad_out.
        """
        found = {which: (tuple(tensor.shape), tensor.stride()) for which, tensor in inputs.items()}
        key = " ".join(f"{which} {found[which]}" for which in ("query", "key", "value"))
        self.record.cudnn[key].add(f"out {found['out'][1]} grad_out {found['grad_out'][1]}")

    def took(self, kernel, tensor):
        self.record.kernels[self.layer()].add(f"{kernel} {short(tensor.dtype)}")

    def kernel(self, name, inputs, outputs):
        if name in KERNELS:
            self.took(KERNELS[name], inputs[0])
        elif self.inside and isinstance(self.inside[-1], torch.nn.RMSNorm):
            return  # one kernel on CUDA; its casts are seen only if torch was built for CPUs
        elif name == "_to_copy" and inputs[0].is_cuda and inputs[0].dtype != outputs[0].dtype:
            self.record.kernels[self.layer()].add(f"{short(inputs[0].dtype)}>{short(outputs[0].dtype)}")

    def copy(self, name, args, outputs, kwargs):
        """Record copies between host and device."""
        if name == "_to_copy":
            source, target, later = args[0], outputs[0], kwargs.get("non_blocking", False)
        elif name == "copy_":
            target, source, later = args[0], args[1], kwargs.get("non_blocking", len(args) > 2 and args[2])
        else:
            return
        if {source.device.type, target.device.type} != {"cpu", "cuda"}:
            return
        self.held.copied(source, target)
        if target.is_cuda and later and source.untyped_storage()._cdata in streams.PINNED:
            self.record.copies[f"to the device at {place()}"] += 1
        elif target.is_cuda:
            self.wait("pageable copy to the device")
        elif later:
            self.record.copies[f"to the host at {place()}"] += 1
        else:
            self.wait("copy to the host")

    def collective(self, name, args, kwargs):
        """Record a collective: its group, and the properties that must be equal on all ranks of the group."""
        if name in ("wait_tensor", "barrier"):
            return
        leaves = [*tree_leaves(args), *tree_leaves(kwargs)]
        group = next(filter(None, map(group_of, leaves)), dist.group.WORLD)
        ranks = dist.get_process_group_ranks(group)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        sizes = " ".join(f"{short(tensor.dtype)}[{tensor.numel()}]" for tensor in tensors)
        if name in ("send", "recv_"):
            other = next(leaf for leaf in args[2:] if isinstance(leaf, int))
            here, there = dist.get_rank(), ranks[other]
            way = f"{here}>{there} sent" if name == "send" else f"{there}>{here} received"
            self.record.messages[way].append(sizes)
            return
        if "alltoall" in name or "all_to_all" in name:
            sizes = short(tensors[0].dtype)
        self.record.collectives[f"{group.group_name} of {ranks}"].append(f"{name} {sizes}")


def changed_by(op, args):
    """Return the tensors that an operator writes in place. For c10d, whose schemas do not show this, it is the first
    argument.
    """
    if op.namespace == "c10d":
        return [] if "send" in str(op) else [leaf for leaf in tree_leaves(args[0]) if isinstance(leaf, torch.Tensor)]
    written = [
        arg
        for arg, known in zip(args, op._schema.arguments, strict=False)
        if known.alias_info and known.alias_info.is_write
    ]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor)]


def group_of(leaf):
    """Return the process group that an argument of a collective is or names; None for any other argument."""
    if isinstance(leaf, str):
        try:
            return dist.distributed_c10d._resolve_process_group(leaf)
        except (RuntimeError, ValueError, KeyError):
            return None
    if isinstance(leaf, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(leaf)
        except (RuntimeError, TypeError):
            return None
    return leaf if isinstance(leaf, dist.ProcessGroup) else None


def short(dtype):
    """Return the name of a dtype as the tables have it."""
    return str(dtype).removeprefix("torch.").replace("bfloat16", "bf16").replace("float", "fp").replace("fp8_e", "e")
