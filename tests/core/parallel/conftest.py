"""A fake world with one rank, for tests of what each rank holds."""

import math

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_hydra.core.job.ranks import DEGREES
from titan_hydra.core.parallel import build_mesh


@pytest.fixture
def world():
    """Return `world(parallelism, rank)`, which returns the mesh of one rank of a fake world. The previous world is left
    first.
    """

    def join(degrees, rank=0):
        leave()
        ranks = math.prod(getattr(degrees, name) for name in DEGREES)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        return build_mesh(degrees, "cpu")

    yield join
    leave()


def leave():
    if dist.is_initialized():
        dist.destroy_process_group()
