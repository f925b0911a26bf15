"""optimizer.offload: between steps, the states of optimizers are in the memory of the host. A step brings them to the
device, those of some parameters at a time, and back. What is computed there is the same as without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_hydra.core.parallel.mesh import local_part

BUCKET = 2**24  # elements of the shards of parameters whose states are copied together, or more
Copies = tuple[list[tuple[Tensor, Tensor]], torch.cuda.Event | None]  # (target, source) of each, and the end of all


class Offloaded:
    """The states of an optimizer in the host's memory. `step` and `load_state_dict` replace the optimizer's own.

    The parameter groups are cut into smaller ones, and each step of the optimizer has one of them. On CUDA, the memory
    of the host is pinned, and two streams copy: while the states of a group are updated, those of the group before
    return to the host, and those of the group after come to the device. So three groups are on the device. Their memory
    belongs to the stream that computes, and this stream waits for the copies.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.plain_step = optimizer, optimizer.step
        optimizer.step, optimizer.load_state_dict = self.step, self.load_state_dict
        # each of Muon's ranks computes a matrix
        ranks = optimizer.group.size() if getattr(optimizer, "group", None) else 1
        optimizer.param_groups[:] = [part for group in optimizer.param_groups for part in parts(group, ranks)]
        self.hosts: dict[tuple[nn.Parameter, str], Tensor] = {}  # memory of the states that are on the device now
        self.up, self.down = None, None
        if any(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"]):
            self.up, self.down = torch.cuda.Stream(), torch.cuda.Stream()
            # the host may read the states, to save them, only after the last copies
            optimizer.register_state_dict_pre_hook(lambda _: torch.cuda.current_stream().synchronize())
        for parameter, states in optimizer.state.items():
            optimizer.state[parameter] = {name: on_host(value) for name, value in states.items()}

    def step(self, closure: None = None) -> None:
        """Make a step of the optimizer with one group after the other."""
        groups = self.optimizer.param_groups
        arriving, leaving = self.fetch(groups[0]), ([], None)
        for group, after in zip_longest(groups, groups[1:]):
            here, arriving = arriving, self.fetch(after) if after else ([], None)
            wait(here)
            self.optimizer.param_groups = [group]
            self.plain_step()
            wait(leaving)
            leaving = self.put_back(group)
        wait(leaving)
        self.optimizer.param_groups = groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state, and leave it on the host: torch would bring all of it to the device."""
        values = state_dict["state"]
        torch.optim.Optimizer.load_state_dict(self.optimizer, state_dict | {"state": {}})
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            if number in values:
                self.optimizer.state[parameter] = {name: on_host(value) for name, value in values[number].items()}

    def fetch(self, group: dict[str, Any]) -> Copies:
        """Begin to copy the states of a group to the device, and put the copies in their places."""
        pairs = []
        for parameter, name, host in self.states(group):
            self.hosts[parameter, name] = host
            device = self.optimizer.state[parameter][name] = torch.empty_like(host, device=parameter.device)
            pairs.append((device, host))
        return pairs, transfer(pairs, self.up)

    def put_back(self, group: dict[str, Any]) -> Copies:
        """Begin to copy the states of a group to the host, and put the copies in their places."""
        pairs = []
        for parameter, name, device in self.states(group):
            host = self.hosts.pop((parameter, name), None)
            self.optimizer.state[parameter][name] = host = empty_on_host(device) if host is None else host
            pairs.append((host, device))
        return pairs, transfer(pairs, self.down)

    def states(self, group: dict[str, Any]) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """Yield the states of a group's parameters. Single numbers, such as a count of steps, stay on the device."""
        for parameter in group["params"]:
            for name, value in list(self.optimizer.state.get(parameter, {}).items()):
                if isinstance(value, Tensor) and value.dim():
                    yield parameter, name, value


def parts(group: dict[str, Any], together: int) -> Iterator[dict[str, Any]]:
    """Cut a parameter group into groups of a multiple of `together` parameters, if there are as many, and at least BUCKET
    elements. They are the same on all ranks that hold shards of these parameters.
    """
    own, size = [], 0
    for parameter in group["params"]:
        own.append(parameter)
        size += shard_elements(parameter)
        if size >= BUCKET and len(own) % together == 0:
            yield group | {"params": own}
            own, size = [], 0
    if own or not group["params"]:
        yield group | {"params": own}


def shard_elements(parameter: Tensor) -> int:
    """Return the number of elements of a parameter's largest shard, for even shards."""
    ranks = 1
    if isinstance(parameter, DTensor):
        for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
            ranks *= 1 if placement.is_replicate() else size
    return -(-parameter.numel() // ranks)


def empty_on_host(value: Tensor) -> Tensor:
    """Allocate memory for a state on the host, pinned if the state is on a GPU."""
    return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)


def on_host(value: Any) -> Any:
    """Return a state that is in the host's memory; a single number stays where it is."""
    if not isinstance(value, Tensor) or not value.dim() or not value.is_cuda:
        return value
    host = empty_on_host(value)
    local_part(host).copy_(local_part(value))
    return host


@torch.no_grad()
def transfer(pairs: list[tuple[Tensor, Tensor]], stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
    """Copy in a stream, after all that the present stream was given, and return the event that marks the end. On a CPU,
    copy at once.
    """
    if stream is None:
        for target, source in pairs:
            local_part(target).copy_(local_part(source))
        return None
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for target, source in pairs:
            local_part(target).copy_(local_part(source), non_blocking=True)
        return stream.record_event()


def wait(copies: Copies) -> None:
    """Let the present stream wait for copies. Their memory on the device may be freed after that."""
    pairs, end = copies
    if end is not None:
        torch.cuda.current_stream().wait_event(end)
    pairs.clear()
