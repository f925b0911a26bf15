"""Test which exit status an exception has, and which of many ranks is to blame."""

import errno
import json
from itertools import permutations

import pytest
import torch
import torch.distributed as dist

from titan_hydra.core.base.errors import CheckpointError, ConfigError, Kind, NotFinite, Stopped
from titan_hydra.core.job.config import to_dict
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.failure import describe, guilty
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.launch.executors.slurm.accounting import cause_of_end
from titan_hydra.experiments.runs import hints

GLOO_CLOSED = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
)
GLOO_LATE = RuntimeError(
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation"
)


def raised(error, cause=None):
    try:
        raise error from cause
    except BaseException as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "status", "secondary"),
    [
        (ValueError("no"), 1, False),
        (ConfigError("no"), 2, False),
        (Stopped("as asked"), 75, False),
        (NotFinite("nan"), 78, False),
        (torch.OutOfMemoryError("CUDA out of memory"), 76, False),
        (MemoryError(), 76, False),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: not enough memory"), 76, False),
        (
            raised(RuntimeError("[Stage 0] failed to run forward"), torch.OutOfMemoryError("CUDA out of memory")),
            76,
            False,
        ),
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
    ],
)
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
    """Write what ranks recorded and what their parent process saw: {rank: (exception or None, time, exit status,
    killed)}.
    """

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


def write_slurm(folder, log, **errors):
    """Write the files of an attempt under SLURM: job.log, and the files of four started ranks; those in `errors`
    recorded why they ended.
    """
    for rank in range(4):
        code, record = describe(errors[f"rank{rank}"]) if f"rank{rank}" in errors else (None, None)
        spoken = {"exit_status": int(code), "error": {**record, "time": 5.0}} if record else {}
        (folder / f"rank_{rank}.json").write_text(json.dumps({"host": f"node{rank // 2}", **spoken}))
    (folder / "job.log").write_text(log)
    return folder


@pytest.mark.parametrize(("status", "kind"), [(2, Kind.CONFIG), (79, Kind.NODE)])
def test_a_layout_that_could_not_be_taken_is_no_killed_batch_script(tmp_path, status, kind):
    line = "22:50:01 node0: run/config.json is not written: cp: cannot stat 'layout_2.json'; nothing is started"
    for name, content in (("job", "7"), ("exit", str(status)), ("job.log", line)):
        (tmp_path / name).write_text(content + "\n")
    failure = cause_of_end(tmp_path, "FAILED")
    assert (failure.kind, failure.status, failure.line) == (kind, status, line)


def test_a_killed_batch_script_and_a_killed_srun_are_failures_of_the_node(tmp_path):
    write_slurm(tmp_path, "")
    assert cause_of_end(tmp_path, "FAILED").kind == Kind.UNKNOWN  # the script may have refused the attempt
    (tmp_path / "job").write_text("7\n")
    failure = cause_of_end(tmp_path, "FAILED")
    assert (failure.kind, failure.status) == (Kind.NODE, 79) and "the batch script was killed" in failure.line
    (tmp_path / "exit").write_text("79\n")
    failure = cause_of_end(tmp_path, "FAILED")
    assert failure.kind == Kind.NODE and "srun was killed" in failure.line
    (tmp_path / "exit").write_text("1\n")
    assert cause_of_end(tmp_path, "FAILED").kind == Kind.UNKNOWN
    (tmp_path / "exit").unlink()
    write_slurm(tmp_path, "", rank1=ValueError("mine"))
    assert cause_of_end(tmp_path, "FAILED").kind == Kind.BUG


def test_earliest_own_error_is_to_blame_and_not_those_who_noticed(attempt):
    failure = attempt(
        {0: (GLOO_CLOSED, 1.0, 1, False), 1: (ValueError("late"), 3.0, 1, False), 2: (KeyError("first"), 2.0, 1, False)}
    )
    assert (failure.rank, failure.status) == (2, 1) and "KeyError" in failure.line and "KeyError" in failure.detail


def test_a_message_cannot_clear_the_readers_screen(attempt, tmp_path):
    failure = attempt({0: (ValueError("\x1b]0;title\x07\x1b[2Jgone\x9b2J"), 1.0, 1, False)})
    assert failure.line == "rank 0: ValueError: gone2J" and "\x1b" not in failure.detail
    (tmp_path / "rank_0.log").write_text("first\x1b[2J\r\tsecond\n")
    assert layout.last_lines(tmp_path / "rank_0.log") == "first\n\tsecond"


def test_silent_death_is_to_blame_before_what_follows(attempt):
    failure = attempt(
        {0: (GLOO_CLOSED, 1.1, 1, False), 1: (None, 1.0, -9, False), 2: (ValueError("because of it"), 1.2, 1, False)}
    )
    assert (
        (failure.rank, failure.status) == (1, 1)
        and "killed by signal 9" in failure.line
        and failure.detail.endswith("last line")
    )


def test_ranks_that_we_killed_are_not_to_blame(attempt):
    failure = attempt({0: (None, 1.0, -9, True), 1: (NotFinite("step 3: nan"), 2.0, 78, False)})
    assert (failure.rank, failure.status, failure.detail) == (1, 78, "") and "step 3: nan" in failure.line


def test_timeout_names_who_did_not_notice(attempt):
    failure = attempt({0: (GLOO_CLOSED, 1.0, 1, False), 1: (GLOO_LATE, 1.5, 77, False), 2: (None, 3.0, -9, True)})
    assert (failure.rank, failure.status) == (1, 77) and "rank 2 was still waiting" in failure.line


def test_timeout_names_who_was_late_by_the_heartbeats(attempt, tmp_path):
    for rank, count in enumerate((9, 9, 7)):
        (tmp_path / f"beat_{rank}.json").write_text(
            json.dumps({"step": 3, "phase": "data", "count": count, "since": 1.0, "time": 1.0})
        )
    failure = attempt({0: (GLOO_CLOSED, 1.0, 1, False), 1: (GLOO_LATE, 1.5, 77, False), 2: (None, 3.0, -9, True)})
    assert (failure.rank, failure.kind) == (
        2,
        Kind.HANG,
    ) and "rank 2 was late: in step 3, data; rank 1: RuntimeError" in failure.line


def test_stopped_ranks_and_good_ends_are_no_failure(attempt):
    assert attempt({0: (Stopped("as asked"), 1.0, 75, False), 1: (None, 1.0, -15, False)}) is None
    assert attempt({0: (None, 1.0, 0, False), 1: (None, 1.0, 0, False)}) is None


def test_power_cut_leaves_nobody_to_blame(tmp_path):
    (tmp_path / "rank_0.json").write_text("{}")
    (tmp_path / "ranks.json").write_text('{"ranks": [{"pid": 1}]}')
    assert guilty(tmp_path) is None


KILLED = """srun: error: node1: task 3: Killed
srun: Terminating StepId=7.0
srun: error: node0: tasks 0-1: Killed
srun: error: node1: task 2: Killed
"""
TIME = "slurmstepd: error: *** JOB 7 ON node0 CANCELLED AT 2026-11-21T10:00 DUE TO TIME LIMIT ***\n"
NODE = "srun: error: Node failure on node1\nslurmstepd: error: *** STEP 7.0 ON node0 CANCELLED AT 10:00 DUE TO NODE FAILURE ***\n"
MEMORY = "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0.\nsrun: error: node1: task 2: Out Of Memory\n"
SCANCEL = "slurmstepd: error: *** JOB 7 ON node0 CANCELLED AT 2026-11-21T10:00 ***\n"


@pytest.mark.parametrize(
    ("log", "state", "kind", "status", "rank", "host"),
    [
        (KILLED, "FAILED", Kind.KILLED, 1, 3, "node1"),
        (KILLED, None, Kind.KILLED, 1, 3, "node1"),
        ("srun: error: node0: task 1: Exited with exit code 1\n", "FAILED", Kind.BUG, 1, 1, "node0"),
        ("srun: error: node0: task 1: Segmentation fault (core dumped)\n" + KILLED, "FAILED", Kind.BUG, 1, 1, "node0"),
        (KILLED, "NODE_FAIL", Kind.NODE, 79, None, None),
        (NODE + KILLED, None, Kind.NODE, 79, None, "node1"),
        ("", "TIMEOUT", Kind.TIME_LIMIT, 75, None, None),
        (TIME + KILLED, None, Kind.TIME_LIMIT, 75, None, None),
        (TIME, "FAILED", Kind.TIME_LIMIT, 75, None, None),
        ("", "CANCELLED", Kind.KILLED, 75, None, None),
        (SCANCEL + KILLED, None, Kind.KILLED, 75, None, None),
        (MEMORY, "FAILED", Kind.OUT_OF_MEMORY, 76, None, "node1"),
        ("", "OUT_OF_MEMORY", Kind.OUT_OF_MEMORY, 76, None, None),
        ("bash: line 3: /opt/python: No such file\n", "FAILED", Kind.UNKNOWN, 1, None, None),
    ],
)
def test_slurms_word_where_no_rank_has_spoken(tmp_path, log, state, kind, status, rank, host):
    failure = cause_of_end(write_slurm(tmp_path, log), state)
    assert (failure.kind, failure.status, failure.rank, failure.host) == (kind, status, rank, host)
    assert kind != Kind.UNKNOWN or "No such file" in failure.detail


@pytest.mark.parametrize("state", ["PREEMPTED", "COMPLETED", None])
def test_a_preempted_job_has_not_failed(tmp_path, state):
    log = "slurmstepd: error: *** JOB 7 ON node0 CANCELLED AT 2026-11-21T10:00 DUE TO PREEMPTION ***\n"
    assert cause_of_end(write_slurm(tmp_path, log), state) is None


def test_a_rank_that_has_spoken_comes_before_slurms_word(tmp_path):
    """srun reports the death of another rank first, and SLURM a time limit, but the exception of the rank is the cause."""
    failure = cause_of_end(write_slurm(tmp_path, KILLED, rank1=ValueError("mine"), rank0=GLOO_CLOSED), "TIMEOUT")
    assert (failure.kind, failure.rank, failure.host) == (Kind.BUG, 1, "node0") and "mine" in failure.line


def test_a_death_that_only_srun_saw_comes_before_those_who_noticed(tmp_path):
    log = "srun: error: node1: task 3: Killed\n"
    failure = cause_of_end(write_slurm(tmp_path, log, rank0=GLOO_CLOSED, rank1=GLOO_LATE, rank2=GLOO_CLOSED), "FAILED")
    assert (failure.kind, failure.rank) == (Kind.KILLED, 3)


BEAT = {"step": 3, "phase": "optimizer", "count": 1, "since": 1.0, "time": 1.0}
EXITED, GONE = "node0: task 0: Exited with exit code 1", {"rank0": GLOO_CLOSED}
ORDERS = {  # srun's lines, ranks that recorded why they ended, ranks that were asked to stop, the rank to blame, words of the message
    "exit 0": (
        [EXITED, "node1: task 3: Killed"],
        GONE | {"rank2": GLOO_CLOSED},
        (3,),
        1,
        "ended with status 0 and without a word",
    ),
    "exit 3": (
        [EXITED, "node0: task 1: Exited with exit code 3", "node1: tasks 2-3: Killed"],
        GONE,
        (2, 3),
        1,
        "status 3 and without",
    ),
    "SIGSEGV": (
        [EXITED, "node0: task 1: Segmentation fault (core dumped)", "node1: tasks 2-3: Killed"],
        GONE,
        (2, 3),
        1,
        "by signal 11",
    ),
    "SIGILL": (
        [EXITED, "node0: task 1: Illegal instruction", "node1: tasks 2-3: Terminated"],
        GONE,
        (),
        1,
        "by signal 4",
    ),
    "SIGKILL": ([EXITED, "node0: task 1: Killed", "node1: tasks 2-3: Killed"], GONE, (2, 3), 1, "killed by signal 9"),
    "SIGKILL, and NCCL aborts": (
        [EXITED, "node0: task 1: Killed", "node1: tasks 2-3: Aborted"],
        GONE,
        (),
        1,
        "killed by signal 9",
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_the_order_of_sruns_lines_means_nothing(tmp_path, case):
    """srun reports a task's end when the task's node tells srun, and a task that dumps core is reported long after
    those that noticed its death.
    """
    lines, spoken, asked, rank, words = ORDERS[case]
    for number in range(4):
        (tmp_path / f"beat_{number}.json").write_text(json.dumps(BEAT | {"asked": 5.0 * (number in asked)}))
    for order in permutations(lines):
        failure = cause_of_end(
            write_slurm(tmp_path, "".join(f"srun: error: {line}\n" for line in order), **spoken), "FAILED"
        )
        assert failure.rank == rank and words in failure.line, (order, failure.line)


@pytest.mark.parametrize("words", ["", "srun: error: Timed out waiting for job step to complete\n"])
@pytest.mark.parametrize("error", [GLOO_CLOSED, GLOO_LATE])
def test_a_node_that_slurm_has_not_given_up_yet(tmp_path, words, error):
    """There is no record of how the ranks of node1 ended, and the ranks of node0 have noticed that they are lost."""
    log = f"srun: error: node0: tasks 0-1: Exited with exit code 1\n{words}"
    failure = cause_of_end(write_slurm(tmp_path, log, rank0=error, rank1=GLOO_CLOSED), "FAILED")
    assert (failure.kind, failure.status, failure.rank, failure.host) == (Kind.NODE, 79, 2, "node1")
    assert failure.line == "node1 is lost: rank 2 has not ended, and nothing was heard of it"


def test_a_frozen_rank_that_srun_kills_is_a_hang(tmp_path):
    """The rank's watchdog thread is frozen too, so the rank has not recorded that it was asked to stop."""
    (tmp_path / "beat_1.json").write_text(json.dumps(BEAT | {"count": 7, "asked": 0.0}))
    (tmp_path / "beat_0.json").write_text(json.dumps(BEAT | {"count": 8, "asked": 0.0}))
    log = "srun: error: node0: task 0: Exited with exit code 77\nsrun: error: node0: task 1: Killed\n"
    failure = cause_of_end(write_slurm(tmp_path, log, rank0=GLOO_LATE, rank2=GLOO_CLOSED, rank3=GLOO_CLOSED), "FAILED")
    assert (failure.kind, failure.rank) == (Kind.HANG, 1) and "rank 1 was late: in step 3, optimizer" in failure.line


def test_preempted_too_often(tmp_path):
    (tmp_path / "requeues_spent").touch()
    failure = cause_of_end(write_slurm(tmp_path, "", rank0=Stopped("as asked")), "FAILED")
    assert (failure.kind, failure.status) == (Kind.PREEMPTED, 75)


@pytest.mark.parametrize(
    ("overrides", "hint"),
    [
        (("model=llama3_8b", "gpus=1"), "ac=lean"),
        (("model=llama3_8b", "gpus=1", "ac=lean"), "ac=op"),
        (("model=llama3_8b", "gpus=1", "ac=full", "data.local_batch=8"), "data.local_batch=4 data.global_batch=8"),
        (("model=llama3_8b", "gpus=1", "ac=full", "data.local_batch=1"), "more ranks"),
        (
            ("model=llama3_8b", "gpus=2", "parallelism=pp", "pp_schedule=zbv", "parallelism.pp=2"),
            "data.local_batch=2 data.global_batch=4",
        ),
    ],
)
def test_out_of_memory_says_how_much_and_what_to_try(tmp_path, overrides, hint):
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(compose_job("cluster=slurm", *overrides))))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    error.facts = {"step": 0, "peak_gib": 93.14, "capacity_gib": 94.5}
    failure = cause_of_end(
        write_slurm(attempt, "", rank1=RuntimeError("[Stage 0] failed"), rank2=raised(RuntimeError("stage"), error))
    )
    assert failure.rank == 1  # the earlier one, now without the other
    (attempt / "rank_1.json").unlink()
    failure = guilty(attempt)
    assert (failure.kind, failure.line) == (Kind.OUT_OF_MEMORY, "rank 2, step 0: peak 93.1 of 94.5 GiB")
    assert hints.hint(failure).startswith(hint)


@pytest.mark.parametrize(
    "error",
    [
        CheckpointError(
            "the checkpoint of step 4 could not be written to /runs/a: rank 0: No space left on device; there is no earlier one"
        ),
        OSError(errno.ENOSPC, "No space left on device"),
        raised(RuntimeError("a writer failed"), OSError(errno.EDQUOT, "Disk quota exceeded")),
    ],
)
def test_a_full_disk_is_a_class_of_its_own(tmp_path, error):
    attempt = tmp_path / "a run" / "attempts" / "1"
    attempt.mkdir(parents=True)
    (attempt.parents[1] / "config.json").write_text(json.dumps(to_dict(compose_job())))
    failure = cause_of_end(write_slurm(attempt, "", rank1=error), "FAILED")
    assert (failure.kind, failure.status, failure.rank) == (Kind.DISK, 1, 1)
    assert f"'{tmp_path}/a run'" in hints.hint(failure) and "launch.retry=failed" in hints.hint(failure)


def test_hints_of_other_classes(tmp_path):
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    job = to_dict(compose_job("cluster=slurm", "cluster.exclude=[node7]", "cluster.time_minutes=30", "debug=tiny"))
    (tmp_path / "config.json").write_text(json.dumps(job))
    assert hints.hint(cause_of_end(write_slurm(attempt, NODE))) == "cluster.exclude=[node7,node1]"
    assert "cluster.time_minutes=60" in hints.hint(cause_of_end(write_slurm(attempt, TIME)))
    assert hints.hint(cause_of_end(write_slurm(attempt, KILLED))) == ""
