"""How rank i of every replica group talks to its peers: a gloo group outside of every mesh, made anew whenever the members change."""
from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from .quorum import Meeting

CHUNK = 1 << 24  # elements that are sent at a time, so that a time-out is about a peer, not about the model's size


class Peers:
    """The processes of the same rank number in the groups that meet."""

    def __init__(self, group: int, rank: int, timeout: float) -> None:
        self.group, self.rank, self.timeout = group, rank, timedelta(seconds=timeout)
        self.lives: dict[int, str] = {}
        self.channel: dist.ProcessGroupGloo | None = None

    def meet(self, meeting: Meeting) -> None:
        """Connect to the members, unless they are those of the meeting before. Raises RuntimeError where one does not answer."""
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
        """Leave the channel: it has failed, or its members have changed."""
        self.channel, self.lives = None, {}

    def add_up(self, vector: Tensor) -> None:
        """Sum over the members, in place. The same bits for each of them."""
        for part in self._parts(vector):
            self.channel.allreduce([part]).wait()

    def hand_over(self, tensor: Tensor, donor: int) -> None:
        """Give every member the donor's tensor, in place, wherever it lies."""
        host = tensor.detach().cpu().contiguous()
        for part in self._parts(host.reshape(-1).view(torch.uint8) if host.numel() else host.reshape(-1)):
            self.channel.broadcast(part, self.members.index(donor)).wait()
        if donor != self.group:
            tensor.copy_(host)

    def _parts(self, vector: Tensor) -> Iterable[Tensor]:
        return vector.split(CHUNK) if self.channel is not None and vector.numel() else ()
