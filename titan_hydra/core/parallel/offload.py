"""ac=offload: between its forward and its backward, the input of a block is in the memory of the host. The backward
computes everything else of the block again, as with ac=full.
"""

from __future__ import annotations

from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class Kept:
    """An input of a block in the host's memory, and on the device: as it was until it has arrived on the host, and as a
    copy from shortly before its use on. `copied` marks the end of the last copy.
    """

    def __init__(self, number: int, host: Tensor, given: Tensor) -> None:
        self.number, self.host, self.device = number, host, given.device
        self.copy: Tensor | None = given
        self.copied: torch.cuda.Event | None = None


class Host:
    """The inputs of one stage's blocks that are in the host's memory, in the order of their forwards.

    On CUDA, the memory is pinned, and a stream of its own copies: to the host while the forward of the block runs, and
    back while the backward of the block after it runs. So two inputs are on the device. Their memory belongs to the
    stream that computes, and this stream waits for the copies. With `record_stream`, memory would become free only when
    the device has copied, which is much later than the host queues more work. On a CPU, an input is copied once.
    """

    def __init__(self) -> None:
        self.numbers, self.last = count(), -1
        self.waiting: WeakValueDictionary[int, Kept] = WeakValueDictionary()  # a graph that is dropped drops its inputs
        self.stream: torch.cuda.Stream | None = None

    def hooks(self) -> saved_tensors_hooks:
        """Return a context in which torch's checkpoint calls `keep` to save a block's input, and `bring` to get it back."""
        return saved_tensors_hooks(self.keep, self.bring)

    def keep(self, saved: Tensor) -> Tensor | Kept:
        """Copy a block's input to the host. What has no gradient (rotary tables, positions) is shared, and stays. torch 2.11
        also saves an empty tensor.
        """
        if not saved.requires_grad or saved.numel() == 0:
            return saved
        host = torch.empty_like(saved, device="cpu", pin_memory=saved.is_cuda)
        if saved.is_cuda:
            self.stream = self.stream or torch.cuda.Stream(saved.device)
            self.leave()
        on_host = Kept(next(self.numbers), host, saved.detach())
        self.transfer(on_host, host, saved)
        self.waiting[on_host.number], self.last = on_host, on_host.number
        return on_host

    def bring(self, on_host: Tensor | Kept) -> Tensor:
        """Return a block's input on its device, and begin to copy the one whose backward is expected next."""
        if isinstance(on_host, Tensor):
            return on_host
        if self.stream is None:
            return on_host.host
        self.waiting.pop(on_host.number, None)
        self.leave()
        self.fetch(on_host)
        if earlier := [number for number in self.waiting if number < on_host.number]:
            self.fetch(self.waiting[max(earlier)])
        torch.cuda.current_stream(on_host.device).wait_event(on_host.copied)
        copy, on_host.copy = on_host.copy, None
        return copy

    def leave(self) -> None:
        """Free the memory on the device of the last input that was copied to the host."""
        last = self.waiting.get(self.last)
        if last is not None and last.copy is not None:
            torch.cuda.current_stream(last.device).wait_event(last.copied)
            last.copy = None

    def fetch(self, on_host: Kept) -> None:
        """Begin to copy an input to its device, unless it is there."""
        if on_host.copy is None:
            on_host.copy = torch.empty_like(on_host.host, device=on_host.device)
            self.transfer(on_host, on_host.copy, on_host.host)

    def transfer(self, on_host: Kept, target: Tensor, source: Tensor) -> None:
        """Copy in the stream that copies, after all that the present stream was given."""
        if self.stream is None:
            target.copy_(source)
            return
        self.stream.wait_stream(torch.cuda.current_stream(on_host.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
            on_host.copied = self.stream.record_event()
