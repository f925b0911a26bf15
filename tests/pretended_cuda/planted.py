"""List faults that are planted to check that the pretended device finds them, one per line: the layout, the fault, and
a part of the message that must report it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from unittest.mock import patch

from tests.pretended_cuda.layouts import LAYOUTS, LLAMA, Layout, layout

NOTHING = "nothing"
SINGLE = layout(1, LLAMA, "parallelism=single", samples=2)
PAIR = layout(2, LLAMA, "parallelism=fsdp", samples=4)


@dataclass(frozen=True)
class Plant:
    """A fault in `layout`, which is active while `put()` runs; `said` is a part of the message that must report it."""

    put: Callable[[], AbstractContextManager]
    said: str
    layout: Layout = SINGLE


def around(place: str, name: str, change: Callable) -> Callable[[], AbstractContextManager]:
    """Return a function that replaces `name` of a module or class by change(original)."""

    def put():
        import pkgutil

        target = pkgutil.resolve_name(place)
        return patch.object(target, name, change(getattr(target, name)))

    return put


def before(act: Callable) -> Callable[[Callable], Callable]:
    """Return a change of a forward that first calls `act` on the forward's input."""

    def change(forward):
        def changed(self, x, *args, **kwargs):
            act(x)
            return forward(self, x, *args, **kwargs)

        return changed

    return change


def in_block(act: Callable) -> Callable[[], AbstractContextManager]:
    """Return a function that acts on the input of every feed-forward."""
    return around("titan_hydra.core.models.layers:FeedForward", "forward", before(act))


def other_stream(x):
    """Read a tensor in a stream that did not wait for the tensor."""
    import torch

    with torch.cuda.stream(torch.cuda.Stream()):
        x.sum()


def freed_early(x):
    """Free a tensor that another stream still reads, and let its own stream continue."""
    import torch

    copy, other = x.detach() * 2, torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        copy.sum()
    del copy
    x.detach().sum()


def reduces_alone(x):
    """Issue a collective on rank 1 only."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        dist.all_reduce(torch.zeros((), device=x.device))


def strided(attention):
    """Return attention whose result and gradient are, at every second call, slices of wider tensors."""
    import torch

    calls = []

    def changed(q, *args, **kwargs):
        calls.append(q)
        out = attention(q, *args, **kwargs)
        wide = torch.cat((out, out), -1).transpose(1, 2).contiguous().transpose(1, 2)
        return wide.narrow(-1, 0, out.shape[-1]) if len(calls) % 2 else out

    return changed


def flash_first(kernels):
    return lambda *args: sorted(kernels(*args), key=lambda kernel: kernel != "flash")


def with_last_backward(set_reduce):
    def changed(module, last):
        module.set_is_last_backward(last)
        set_reduce(module, last)

    return changed


def longer(make):
    """Return a function that sends messages between pipeline stages with one element too many."""

    def changed(self, op, tensor, *args, **kwargs):
        import torch

        sent = op is torch.distributed.isend
        make(self, op, torch.nn.functional.pad(tensor.detach().flatten(), (0, 1)) if sent else tensor, *args, **kwargs)

    return changed


PLANTED = {
    NOTHING: Plant(nullcontext, ""),
    "a host tensor in a block": Plant(
        in_block(lambda x: x + __import__("torch").ones(x.shape[-1])), "takes a host tensor"
    ),
    "a number read": Plant(
        in_block(lambda x: x.sum().item()), "item at core/models/layers.py Block.forward: the host waits"
    ),
    "a list read": Plant(
        in_block(lambda x: x[0, :2, 0].tolist()), "tolist at core/models/layers.py Block.forward: the host waits"
    ),
    "nonzero": Plant(in_block(lambda x: x.nonzero()), "nonzero at core/models/layers.py Block.forward"),
    "a copy to the host": Plant(
        in_block(lambda x: x.sum().cpu()), "copy to the host at core/models/layers.py Block.forward"
    ),
    "a list as a tensor": Plant(
        in_block(lambda x: __import__("torch").tensor([1, 2], device=x.device)), "pageable copy to the device"
    ),
    "a batch from pageable memory": Plant(
        around("titan_hydra.core.data.batch", "onto", lambda onto: lambda device, tensor: tensor.to(device)),
        "pageable copy to the device",
    ),
    "a wait for everything": Plant(
        in_block(lambda x: __import__("torch").cuda.synchronize()), "synchronize at core/models/layers.py"
    ),
    "a stream that does not wait": Plant(in_block(other_stream), "does not wait for the stream"),
    "memory freed under another stream": Plant(in_block(freed_early), "is freed while a stream"),
    "flash before cuDNN": Plant(
        around("titan_hydra.core.kernels.attention", "kernels", flash_first), "layers.*.attention.sdpa"
    ),
    "no rotation, and none of its casts": Plant(
        around("titan_hydra.core.models.layers", "rotate", lambda rotate: lambda x, rotary: x), "layers.*.attention "
    ),
    "an attention whose gradient has strides": Plant(
        around("torch.nn.functional", "scaled_dot_product_attention", strided), "several strides"
    ),
    "gradients in the layout that they come in": Plant(
        around(
            "titan_hydra.core.kernels.attention:OneLayout",
            "backward",
            lambda _: staticmethod(lambda ctx, gradient: gradient),
        ),
        "several strides",
        LAYOUTS["flux, fsdp 2"],
    ),
    "cuDNN in a ring": Plant(
        around(
            "titan_hydra.core.parallel.context",
            "kernels",
            lambda kernels: lambda asked, call: kernels(asked, call._replace(ring=False)),
        ),
        "several strides",
        LAYOUTS["llama3, cp 2, ring by allgather"],
    ),
    "a collective of one rank": Plant(in_block(reduces_alone), "allreduce_ fp32[1] on rank 1", PAIR),
    "the last backward marked": Plant(
        around("torch.distributed.fsdp:FSDPModule", "set_requires_all_reduce", with_last_backward),
        "gathers, not 21",
        LAYOUTS["llama3, fsdp 2, three microbatches"],
    ),
    "a message that is too long": Plant(
        around("torch.distributed:P2POp", "__init__", longer), "messages 0>1", LAYOUTS["llama3, pp 2, zbv"]
    ),
}
