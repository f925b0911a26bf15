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
    """An input of a block in the host's memory and, from shortly before its use on, its copy on the device."""

    def __init__(self, number: int, host: Tensor, device: torch.device) -> None:
        self.number, self.host, self.device = number, host, device
        self.copy: Tensor | None = None
        self.arrived: torch.cuda.Event | None = None


class Host:
    """The inputs of one stage's blocks that are in the host's memory, in the order of their forwards.

    On CUDA, the memory is pinned, and a stream of its own copies from and to it. While a block's backward runs, the
    input of the block before it is copied, so two inputs are on the device. On a CPU, an input is copied once.
    """

    def __init__(self) -> None:
        self.numbers = count()
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
            self.stream.wait_stream(torch.cuda.current_stream(saved.device))
            with torch.cuda.stream(self.stream):
                host.copy_(saved, non_blocking=True)
            saved.record_stream(self.stream)  # its memory is not reused before the copy has ended
        else:
            host.copy_(saved)
        on_host = Kept(next(self.numbers), host, saved.device)
        self.waiting[on_host.number] = on_host
        return on_host

    def bring(self, on_host: Tensor | Kept) -> Tensor:
        """Return a block's input on its device, and begin to copy the one whose backward is expected next."""
        if isinstance(on_host, Tensor):
            return on_host
        if self.stream is None:
            return on_host.host
        copy = self.copied(on_host)
        self.waiting.pop(on_host.number, None)
        if earlier := [number for number in self.waiting if number < on_host.number]:
            self.copied(self.waiting[max(earlier)])
        current = torch.cuda.current_stream(on_host.device)
        current.wait_event(on_host.arrived)
        copy.record_stream(current)
        on_host.copy = None
        return copy

    def copied(self, on_host: Kept) -> Tensor:
        """Return the copy of an input on its device. Begin to copy it if that was not done before."""
        if on_host.copy is None:
            with torch.cuda.stream(self.stream):
                on_host.copy = on_host.host.to(on_host.device, non_blocking=True)
                on_host.arrived = torch.cuda.current_stream(on_host.device).record_event()
        return on_host.copy
