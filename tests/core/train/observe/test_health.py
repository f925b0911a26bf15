"""Test the check before training: unfit devices, ranks that do not arrive, collectives that do not end. Each message
names the host.
"""

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from titan_hydra.core.base.errors import ConfigError, Unhealthy
from titan_hydra.core.job.config.operation import Comm
from titan_hydra.core.job.run.failure import Kind, describe, guilty
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train.observe import health
from titan_hydra.experiments.launch.executors.slurm.submit import unfit_hosts
from titan_hydra.experiments.runs.rundir import State

HERE = socket.gethostname()


@pytest.fixture
def ranks(tmp_path):
    """Return `ranks(action, size, absent)`, which runs an action on the ranks of a world, each in a thread, and returns
    each rank's result or error.
    """

    def run(action, size=3, absent=()):
        store = dist.HashStore()

        def rank(number):
            (tmp_path / f"rank_{number}.json").write_text(json.dumps({"host": f"node{number}"}))
            if number in absent:
                return None
            try:
                return action(Run(tmp_path, tmp_path, number, number, size, store))
            except (ConfigError, Unhealthy) as error:
                return error

        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(rank, range(size)))

    return run


def test_fit_ranks_are_checked_in_no_time(ranks):
    health.matmul(torch.device("cpu"))
    began = time.perf_counter()
    assert ranks(lambda run: health.check_device(run, Comm())) == [torch.device("cpu")] * 3
    assert time.perf_counter() - began < 0.3


def test_an_unfit_device_speaks_for_itself(ranks, monkeypatch, tmp_path):
    real = health.run_within
    monkeypatch.setattr(
        health,
        "run_within",
        lambda seconds, what, action: (
            real(0.2, what, lambda: time.sleep(1)) if threading.current_thread().name.endswith("_1") else None
        ),
    )
    errors = ranks(lambda run: health.check_device(run, Comm(init_timeout_seconds=20)))
    assert all(f"{HERE}: the matmul of device cpu did not end within 0.2 s" in str(error) for error in errors)
    assert sum(describe(error)[1]["secondary"] for error in errors) == 2 and describe(errors[0])[0] == 79


def test_ranks_that_do_not_come_are_named_with_their_host(ranks, tmp_path):
    errors = ranks(lambda run: health.check_device(run, Comm(init_timeout_seconds=1)), absent=(2,))
    assert [str(error) for error in errors[:2]] == ["node2 (rank 2): did not come within 1 s"] * 2
    for number, error in enumerate(errors[:2]):
        status, record = describe(error)
        (tmp_path / f"rank_{number}.json").write_text(
            json.dumps({"host": f"node{number}", "exit_status": status, "error": record})
        )
    failure = guilty(tmp_path)
    assert (failure.kind, failure.host, failure.status) == (Kind.NODE, "node2", 79)


def test_a_host_without_its_gpus_does_not_train_on_its_cpu(ranks):
    said = ranks(lambda run: health.await_verdict(run, {"device": "cpu" if run.rank == 1 else "cuda", "fault": ""}, 5))
    assert all("no GPU can be seen there" in verdict["fault"] for verdict in said)
    run = Run(None, None, 0, 0, 3)
    assert describe(health.error_of_another(said[0], run))[0] == 79
    said = ranks(
        lambda run: health.await_verdict(
            run,
            {"device": "cpu", "fault": "", "config": True}
            if run.rank == 1
            else {"device": "cuda", "fault": "", "config": False},
            5,
        )
    )
    assert describe(health.error_of_another(said[0], run))[0] == 2, "it was given none"


@pytest.fixture
def pretended(monkeypatch):
    """Return `pretended(seen, given, broken)`: torch sees `seen` devices, the rank was given `given`, and with `broken`
    the allocator fails at first.
    """

    def pretend(seen, given, broken=False):
        failures = [RuntimeError("CUDA driver error: operation not supported")] * broken
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch, "empty", lambda *_, **__: failures and (_ for _ in ()).throw(failures.pop()))
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(given))))

    return pretend


def test_the_device_of_a_rank(pretended, monkeypatch):
    """If SLURM binds a GPU to each task, a rank sees one device, whatever the rank's number. SLURM may also give a rank
    a device that has failed.
    """
    changed = []
    monkeypatch.setattr(health, "set_allocator", changed.append)
    run = Run(None, None, 11, 3, 16)
    for seen, given, index in ((8, 8, 3), (1, 1, 0)):
        pretended(seen, given)
        assert health.device_of(run) == torch.device("cuda", index)
    pretended(8, 8, broken=True)
    assert health.device_of(run) == torch.device("cuda", 3) and changed == ["expandable_segments:False"]
    pretended(2, 2)
    with pytest.raises(
        ConfigError, match=r"rank 11 is number 3 there and was given 2 devices: it needs all of the node's"
    ):
        health.device_of(run)
    for seen in (3, 1):
        pretended(seen, 8)
        with pytest.raises(Unhealthy, match=f"device 3 is missing; {seen} can be seen"):
            health.device_of(run)


@pytest.mark.parametrize("given, status, excluded", [(2, 2, ()), (8, 79, ("node2",))])
def test_hosts_are_left_out_for_failed_devices_and_not_for_hidden_ones(
    ranks, pretended, tmp_path, given, status, excluded
):
    pretended(2, given)
    comm = Comm(init_timeout_seconds=20, health_check_seconds=0)
    errors = ranks(lambda run: health.check_device(run, comm))
    for number, error in enumerate(errors):
        ended, record = describe(error)
        (tmp_path / f"rank_{number}.json").write_text(
            json.dumps({"host": f"node{number}", "exit_status": ended, "error": record})
        )
    failure = guilty(tmp_path)
    assert (failure.rank, failure.status) == (2, status)
    assert unfit_hosts([State("failed", failure=failure)]) == excluded


def test_wrong_numbers(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda a, b: torch.mm(a, b) * (1 + (a.dtype == torch.bfloat16)))
    with pytest.raises(Unhealthy, match=f"{HERE}: a matmul of device 0 .cpu. gave wrong numbers in torch.bfloat16"):
        health.matmul(torch.device("cpu"))


def test_memory_that_others_hold(monkeypatch):
    left = iter([10, 10, 95])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(left, 10) * 2**30, 100 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 0)
    monkeypatch.setattr(health.time, "sleep", lambda _: None)
    health.wait_until_free(torch.device("cuda", 2), 5)  # the memory of the process before this one was still in use
    with pytest.raises(Unhealthy, match="of device 2 are taken by other processes"):
        health.wait_until_free(torch.device("cuda", 2), 0)


def test_a_collective_that_does_not_end(on_ranks):
    def task(rank):
        run = Run(None, None, rank, rank, 2)
        health.check_links(run, Comm(), torch.device("cpu"))
        if rank == 0:
            with pytest.raises(Unhealthy, match=r"the first collective over 2 ranks .rank 0. did not end within 1 s"):
                health.check_links(run, Comm(health_check_seconds=1), torch.device("cpu"))
        else:
            time.sleep(1.5)
            health.check_links(run, Comm(), torch.device("cpu"))

    on_ranks(2, task)
