"""Which exit status an exception has, and which rank of many is to blame."""
import json

import pytest
import torch
import torch.distributed as dist

from titan_hydra.config.status import ConfigError, NotFinite, Stopped
from titan_hydra.launch.failure import describe, guilty

GLOO_CLOSED = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234")
GLOO_LATE = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation")


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(("error", "status", "secondary"), [
    (ValueError("no"), 1, False),
    (ConfigError("no"), 2, False),
    (Stopped("as asked"), 75, False),
    (NotFinite("nan"), 78, False),
    (torch.OutOfMemoryError("CUDA out of memory"), 76, False),
    (MemoryError(), 76, False),
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory"), 76, False),
    (raised(RuntimeError("[Stage 0] failed to run forward"), torch.OutOfMemoryError("CUDA out of memory")), 76, False),
    (GLOO_CLOSED, 1, True),
    (GLOO_LATE, 77, True),
    (dist.DistBackendError("NCCL error: remote process exited or there was a network error"), 1, True),
    (dist.DistStoreError("wait timeout after 300000ms, keys: /0"), 77, True),
    (ConnectionResetError(), 1, True),
    (ValueError("timed out of patience"), 1, False),
    (SystemExit(), 0, False),
    (SystemExit(78), 78, False),
    (SystemExit("words"), 1, False),
    (KeyboardInterrupt(), 130, False),
])
def test_status_of_an_exception(error, status, secondary):
    found, record = describe(error)
    assert (found, record["secondary"]) == (status, secondary)


def test_real_allocation_failure_is_out_of_memory():
    try:
        torch.empty(2**60)
    except RuntimeError as error:
        assert describe(error)[0] == 76


@pytest.fixture
def attempt(tmp_path):
    """Writes what ranks said and what their parent saw: {rank: (exception or None, time, exit status, killed)}."""
    def write(ranks):
        seen = []
        for rank, (error, at, status, killed) in ranks.items():
            if error is not None:
                code, record = describe(error)
                content = {"exit_status": int(code), "error": {**record, "time": at}}
            else:
                content = {"exit_status": 0, "error": None} if status == 0 else {}
            (tmp_path / f"rank_{rank}.json").write_text(json.dumps(content))
            (tmp_path / f"rank_{rank}.log").write_text("before\nlast line\n")
            seen.append({"exit_status": status, "ended": at, "killed": killed})
        (tmp_path / "ranks.json").write_text(json.dumps({"ranks": seen}))
        return guilty(tmp_path)
    return write


def test_earliest_own_error_is_to_blame_and_not_those_who_noticed(attempt):
    failure = attempt({0: (GLOO_CLOSED, 1.0, 1, False), 1: (ValueError("late"), 3.0, 1, False), 2: (KeyError("first"), 2.0, 1, False)})
    assert (failure.rank, failure.status) == (2, 1) and "KeyError" in failure.line and "KeyError" in failure.detail


def test_silent_death_is_to_blame_before_what_follows(attempt):
    failure = attempt({0: (GLOO_CLOSED, 1.1, 1, False), 1: (None, 1.0, -9, False), 2: (ValueError("because of it"), 1.2, 1, False)})
    assert (failure.rank, failure.status) == (1, 1) and "killed by signal 9" in failure.line and failure.detail.endswith("last line")


def test_ranks_that_we_killed_are_not_to_blame(attempt):
    failure = attempt({0: (None, 1.0, -9, True), 1: (NotFinite("step 3: nan"), 2.0, 78, False)})
    assert (failure.rank, failure.status, failure.detail) == (1, 78, "") and "step 3: nan" in failure.line


def test_timeout_names_who_did_not_notice(attempt):
    failure = attempt({0: (GLOO_CLOSED, 1.0, 1, False), 1: (GLOO_LATE, 1.5, 77, False), 2: (None, 3.0, -9, True)})
    assert (failure.rank, failure.status) == (1, 77) and "rank 2 had not noticed" in failure.line


def test_stopped_ranks_and_good_ends_are_no_failure(attempt):
    assert attempt({0: (Stopped("as asked"), 1.0, 75, False), 1: (None, 1.0, -15, False)}) is None
    assert attempt({0: (None, 1.0, 0, False), 1: (None, 1.0, 0, False)}) is None


def test_power_cut_leaves_nobody_to_blame(tmp_path):
    (tmp_path / "rank_0.json").write_text("{}")
    (tmp_path / "ranks.json").write_text('{"ranks": [{"pid": 1}]}')
    assert guilty(tmp_path) is None
