"""Communication between the replica groups: rank i of each group exchanges data with rank i of every other group, in a
gloo group that belongs to no mesh. The gloo group is created again whenever its members change.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .quorum import Meeting

CHUNK = 1 << 24  # maximum number of elements in a transfer: its time-out need not depend on the model's size


class Peers:
    """The ranks with the same index in the replica groups of a meeting."""

    def __init__(self, group: int, rank: int, timeout: float) -> None:
        self.group, self.rank, self.timeout = group, rank, timedelta(seconds=timeout)
        self.lives: dict[int, str] = {}
        # a ProcessGroupGloo; the annotation is Any because some builds of torch lack this class
        self.channel: Any = None

    def meet(self, meeting: Meeting) -> None:
        """Connect to the members of a meeting, unless the previous meeting had the same members. Raises RuntimeError if
        a member does not answer.
        """
        if self.channel is not None and self.lives == meeting.members:
            return
        self.part()
        members = sorted(meeting.members)
        if len(members) > 1:
            host, _, port = meeting.address.rpartition(":")
            store = dist.TCPStore(host, int(port), None, False, self.timeout, wait_for_workers=False)
            named = dist.PrefixStore(f"{meeting.number}/{self.rank}", store)
            self.channel = dist.ProcessGroupGloo(named, members.index(self.group), len(members), self.timeout)
        self.lives, self.members = meeting.members, members

    def part(self) -> None:
        """Close the channel, because it has failed or its members have changed."""
        self.channel, self.lives = None, {}

    def add_up(self, vector: Tensor) -> None:
        """Sum a vector over the members, in place; all members get bit-identical results."""
        for part in self._parts(vector):
            self.channel.allreduce([part]).wait()

    def hand_over(self, tensor: Tensor, donor: int) -> None:
        """Broadcast a tensor of the donor to every member, in place. The tensor may be on any device."""
        host = tensor.detach().cpu().contiguous()
        for part in self._parts(host.reshape(-1).view(torch.uint8) if host.numel() else host.reshape(-1)):
            self.channel.broadcast(part, self.members.index(donor)).wait()
        if donor != self.group:
            tensor.copy_(host)

    def _parts(self, vector: Tensor) -> Iterable[Tensor]:
        return vector.split(CHUNK) if self.channel is not None and vector.numel() else ()
