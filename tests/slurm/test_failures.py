"""Cause failures one by one on a real SLURM. Each gets the right class and ends all ranks soon; its job is FAILED for
SLURM, and is retried if asked.
"""

import time

# For each kind of cell: the rank that fails in step 3, and the code that it runs then, after it has written the time.
# The kind is the cell's max_norm minus 1000; no gradient has so large a norm, so max_norm changes nothing else.
ACTS = {
    1: ("rank == 1", "os._exit(1)"),
    2: ("rank == 1", "os.kill(os.getpid(), 9)"),
    3: ("rank == 0", "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')"),
    4: ("rank == 1", "time.sleep(1000)"),
    5: ("rank == 1", "next(self.model.parameters()).detach().to_local().fill_(float('nan'))"),
    6: ("rank == 3", "raise ValueError('unlucky rank')"),
    9: ("rank == 1", "os._exit(0)"),
    10: ("rank == 1", "import ctypes; ctypes.string_at(0)"),
    11: ("rank == 1", "os.kill(os.getpid(), 19)"),  # srun lets the process continue before it ends it
}
FAIL = """
import time
update, count = trainer.Trainer.update, []
def act(self, *given):
    count.append(1)
    if len(count) == 3:
        for kind, (who, what) in {acts!r}.items():
            if self.job.optimizer.max_norm == 1000 + kind and eval(who):
                open(f"struck_{{kind}}", "w").write(str(time.time()))
                exec(what)
    update(self, *given)
trainer.Trainer.update = act
if os.environ.get("UNFIT_RANK") == str(rank):
    import torch
    product = torch.Tensor.__matmul__
    torch.Tensor.__matmul__ = lambda left, right: product(left, right) + 1
"""
EXPECTED = {  # class, rank, exit status, words of the message
    1: ("bug", 1, 1, "rank 1 ended with status 1 and without a word"),
    2: ("killed", 1, 1, "rank 1 was killed by signal 9"),
    3: ("out of memory", 0, 76, "rank 0"),
    4: ("hang", None, 77, "rank 1"),
    5: ("not finite", None, 78, "loss nan"),
    6: ("bug", 3, 1, "rank 3: ValueError: unlucky rank"),
    9: ("bug", 1, 1, "rank 1 ended with status 0 and without a word"),
    10: ("bug", 1, 1, "rank 1 was killed by signal 11"),
    11: ("hang", 1, 77, "rank 1 was late"),
}
HANG = 20  # seconds; short enough for a test, long enough for a busy machine


def test_failures_have_their_names_and_end_soon(submit):
    (submit.folder / "notes.txt").write_text("Far out in the uncharted backwaters. " * 300)
    submit.sabotage(FAIL.format(acts=ACTS))
    kinds = ",".join(str(1000 + kind) for kind in EXPECTED if kind != 6)
    sweep = ("-m", "gpus=2", f"optimizer.max_norm={kinds}", f"comm.train_timeout_seconds={HANG}", "sweep.name=pairs")
    submit.submit(*sweep)
    submit.submit("gpus=4", "optimizer.max_norm=1006")
    with submit.cluster.closed():
        submit.submit("gpus=1", "data=text_files", "data.path=notes.txt", "optimizer.max_norm=1007")
        (submit.folder / "notes.txt").unlink()
    submit.submit("gpus=2", "optimizer.max_norm=1008", "cluster.gpus_per_node=1", "+cluster.environment.UNFIT_RANK='1'")
    submit.settle(seconds=300)

    status = submit.status()
    for kind, (name, rank, code, words) in EXPECTED.items():
        run = submit.cell(f"optimizer.max_norm={1000 + kind}")
        failure, job = status[run]["failure"], submit.job(run)
        assert status[run]["state"] == "failed" and failure, (kind, status[run], submit.story())
        assert (failure["kind"], failure["status"]) == (name, code), failure
        assert failure["rank"] == rank or rank is None, failure
        assert words in failure["line"], failure
        assert job["JobState"] == "FAILED", (kind, job)
        assert job["ExitCode"] in (f"{code}:0", *(("137:0", "139:0") if kind in (2, 4, 10, 11) else ())), (
            kind,
            job["ExitCode"],
        )
        struck = float((submit.folder / f"struck_{kind}").read_text())
        assert ended(job) - struck < 15 + (HANG if name == "hang" else 0), (kind, ended(job) - struck)
        assert submit.attempts(run) == [1]
    gone = submit.cell("optimizer.max_norm=1007")
    assert status[gone]["failure"]["kind"] == "config" and "notes.txt" in status[gone]["failure"]["line"], status[gone]
    unfit = submit.cell("optimizer.max_norm=1008")
    failure, host = status[unfit]["failure"], submit.rank_record(unfit, 1)["host"]
    assert (failure["kind"], failure["status"], failure["host"]) == ("node", 79, host), failure
    assert f"{host}: a matmul of device 0 (cpu) gave wrong numbers" in failure["line"], failure
    assert submit.processes() == []

    submit.heal()
    with submit.cluster.closed():  # only the chosen cells wait there
        assert submit.run(*submit.line(*sweep)).returncode != 0
        assert chosen(submit) == []
        submit.run(*submit.line(*sweep, "launch.retry=oom"))
        assert chosen(submit) == [1003]
        submit.titan("resume", "runs", "--only", "killed")
        assert chosen(submit) == [1002, 1003]
        submit.titan("resume", "runs", "--only", "hang", "--only", "nan", "--as-is")
        assert chosen(submit) == [1002, 1003, 1004, 1005, 1011]
        submit.run(*submit.line(*sweep, "launch.retry=failed"))
        assert chosen(submit) == [1001, 1002, 1003, 1004, 1005, 1009, 1010, 1011]
        submit.titan("resume", "runs", "--only", "node")
        assert chosen(submit) == [1001, 1002, 1003, 1004, 1005, 1008, 1009, 1010, 1011]
        assert submit.job(unfit, 2)["ExcNodeList"] == host
    submit.wait(lambda: submit.done(submit.cell("optimizer.max_norm=1003")), seconds=120)


def chosen(submit) -> list[int]:
    """Return the cells that have a waiting job, by their max_norm."""
    waiting = {job.split("_")[0] for job in submit.cluster.active()}
    found = [
        run
        for run in submit.cells()
        if (run / "attempts" / "2").exists() and submit.job_id(run, 2).split("_")[0] in waiting
    ]
    return sorted(
        int(line.split("=")[1])
        for run in found
        for line in (run / "overrides.txt").read_text().split()
        if "max_norm" in line
    )


def ended(job: dict[str, str]) -> float:
    """Return the time at which all processes of a job were gone."""
    return time.mktime(time.strptime(job["EndTime"], "%Y-%m-%dT%H:%M:%S"))


LACKING = """
import os
if os.environ.get("SLURM_PROCID") == "1":
    if os.environ["HOW"] == "raise":
        raise ImportError("libfoo.so.3: cannot open shared object file")
    os._exit(1)
"""


def test_a_rank_that_fails_before_training_fails_the_job_once(submit):
    """srun asks the other ranks to stop, and they exit with 75. This is not a reason to requeue the job."""
    (submit.folder / "lacking.py").write_text(LACKING)
    line = ("gpus=2", "cluster.gpus_per_node=1", "parallelism=fsdp", "train.imports=[lacking]")
    for how, code, words in (("raise", 2, "libfoo.so.3"), ("exit", 1, "rank 1 ended with status 1")):
        submit.submit(*line, f"+cluster.environment.HOW={how}", f"seed={len(how)}")
        run = submit.cell(f"seed={len(how)}")
        submit.settle(seconds=150)
        cell = submit.status()[run]
        assert (run / "attempts/1/exit").read_text() == f"{code}\n" and not (run / "attempts/2").exists(), (
            submit.story()
        )
        assert cell["state"] == "failed" and words in cell["failure"]["line"], cell


BUILD = """
import time
build = loop.build
def fails(job, device):
    if rank == 1:
        raise ValueError("a build that fails")
    time.sleep(60)
    return build(job, device)
loop.build = fails
"""


def test_a_rank_that_fails_in_the_build_fails_the_job_once(submit):
    """The other rank is asked to stop while it builds the model, before the trainer handles the signal; the watchdog
    handles it.
    """
    submit.sabotage(BUILD)
    submit.submit("gpus=2", "cluster.gpus_per_node=1", "parallelism=fsdp")
    (run,) = submit.cells()
    submit.settle(seconds=150)
    cell = submit.status()[run]
    assert (run / "attempts/1/exit").read_text() == "1\n" and not (run / "attempts/2").exists(), submit.story()
    assert not (run / "attempts/1/stopped").exists() and submit.rank_record(run, 0)["exit_status"] == 75
    assert cell["state"] == "failed" and "a build that fails" in cell["failure"]["line"], cell
