"""Ranks as threads of one process: collectives have real values, and ranks that cannot continue are named."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from titan_hydra.instruments.verify.matrix import MATRIX
from titan_hydra.instruments.verify.threads import Stuck, as_threads
from titan_hydra.instruments.verify.verify import job_of, trace

RANKS = 12


def test_collectives_of_every_dimension_have_the_values_of_their_ranks():
    found = {}

    def task():
        rank = dist.get_rank()
        mesh = init_device_mesh("cpu", (3, 4), mesh_dim_names=("outer", "inner"))
        sums = [torch.tensor(float(rank)) for _ in range(3)]
        for value, group in zip(sums, (None, mesh.get_group("outer"), mesh.get_group("inner")), strict=True):
            dist.all_reduce(value, group=group)
        arrived = torch.empty(4)
        dist.all_to_all_single(arrived, rank * 10 + torch.arange(4.0), group=mesh.get_group("inner"))
        scattered = torch.empty(1)
        name = next(name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name))
        getattr(dist, name)(scattered, rank + torch.arange(4.0), group=mesh.get_group("inner"))
        objects = [None] * RANKS
        dist.all_gather_object(objects, rank)
        found[rank] = [value.item() for value in sums], arrived.tolist(), scattered.item(), objects

    as_threads(RANKS, task)
    for rank, (sums, arrived, scattered, objects) in found.items():
        row, column = divmod(rank, 4)
        assert sums == [66, 3 * column + 12, 16 * row + 6]
        assert arrived == [(4 * row + other) * 10 + column for other in range(4)]
        assert scattered == 16 * row + 6 + 4 * column and objects == list(range(RANKS))


def test_a_layout_has_the_same_gradients_on_threads_as_on_processes(on_ranks, tmp_path):
    """While a rank's thread waits, other threads change settings such as loss parallelism. The rank's gradients must
    not depend on these changes.
    """
    case = next(case for case in MATRIX if case.name == "fsdp 4, tp 2, uneven mask, vocabulary 2047, loss parallel on")

    def task():
        run = trace(job_of(case, 2), torch.device("cpu"), case)
        if dist.get_rank() == 0:
            torch.save(vars(run), tmp_path / "run.pt")

    found = []
    # the threads run in a process of their own, because torch 2.15 forks no process in which a thread has computed
    # gradients
    for ranks, start in ((1, lambda rank: as_threads(4, task)), (4, lambda rank: task())):
        on_ranks(ranks, start)
        found.append(torch.load(tmp_path / "run.pt"))
    threads, processes = found
    assert threads["start"].keys() == processes["start"].keys() and threads["rounded"] == processes["rounded"] == 0
    for name, gradient in processes["gradients"].items():
        torch.testing.assert_close(threads["gradients"][name], gradient, rtol=1e-5, atol=1e-8)


def test_ranks_that_wait_for_each_other_are_named():
    def halves():
        group = dist.new_group(range(2)), dist.new_group(range(2, 4))
        mine = group[dist.get_rank() // 2]
        if dist.get_rank() == 3:
            dist.barrier()
        dist.all_reduce(torch.ones(1), group=mine)

    with pytest.raises(Stuck) as caught:
        as_threads(4, halves)
    assert str(caught.value).splitlines() == [
        "ranks that have ended: [0, 1]",
        "ranks [2] wait in AllReduce(RedOpType.SUM) of ranks [2, 3]",
        "ranks [3] wait in AllReduce(RedOpType.SUM) of ranks [0, 1, 2, 3]",
    ]


def test_ranks_that_call_different_collectives_are_named():
    def mixed():
        value = torch.ones(2)
        dist.broadcast(value, src=0) if dist.get_rank() == 2 else dist.all_reduce(value)

    with pytest.raises(RuntimeError, match=r"rank 2 calls Broadcast\(0\) where ranks \[0, 1\] call AllReduce"):
        as_threads(3, mixed)


def test_the_first_error_of_a_rank_is_raised():
    def task():
        if dist.get_rank() == 1:
            raise ValueError("a rank's own")
        dist.barrier()

    with pytest.raises(ValueError, match="a rank's own") as caught:
        as_threads(3, task)
    assert caught.value.__notes__ == ["on rank 1 of 3"]
    as_threads(2, lambda: dist.barrier())  # and the next world starts afresh
