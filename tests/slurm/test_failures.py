"""Cause failures one by one on a real SLURM. Each gets the right class and ends all ranks soon; its job is FAILED for
SLURM, and is retried if asked.
"""

import time

from tests.kits import endings

UNFIT = """
if os.environ.get("UNFIT_RANK") == str(rank):
    import torch
    product = torch.Tensor.__matmul__
    torch.Tensor.__matmul__ = lambda left, right: product(left, right) + 1
"""
HANG_OF_ALL = f"comm.train_timeout_seconds={endings.HANG}"


def test_failures_have_their_names_and_end_soon(submit):
    (submit.folder / "notes.txt").write_text("Far out in the uncharted backwaters. " * 300)
    submit.sabotage(endings.CODE + UNFIT)
    numbers = {name: 1000 + number for name, number in endings.NUMBERS.items()}
    norms = f"optimizer.max_norm={','.join(map(str, numbers.values()))}"
    sweep = ("-m", "gpus=2", norms, HANG_OF_ALL, "sweep.name=pairs")
    submit.submit(*sweep)
    with submit.cluster.closed():
        submit.submit("gpus=1", "data=text_files", "data.path=notes.txt", "seed=1007")
        (submit.folder / "notes.txt").unlink()
    submit.submit("gpus=2", "seed=1008", "cluster.gpus_per_node=1", "+cluster.environment.UNFIT_RANK='1'")
    submit.settle(seconds=400)

    status = submit.status()
    for name, ending in endings.ENDINGS.items():
        run = submit.cell(endings.override(name))
        assert run in status, submit.story()
        endings.check(name, status[run])
        job = submit.job(run)
        assert job["JobState"] == "FAILED", (name, job)
        assert job["ExitCode"] in (f"{ending.status}:0", *(("137:0", "139:0") if ending.killed else ())), (name, job)
        struck = float((submit.folder / f"struck_{endings.NUMBERS[name]}").read_text())
        late = ended(job) - struck
        assert late < 15 + (endings.HANG if ending.failure == "hang" else 0), (name, late)
        assert submit.attempts(run) in ([1], []), name
    gone = submit.cell("seed=1007")
    assert status[gone]["failure"]["kind"] == "config" and "notes.txt" in status[gone]["failure"]["line"], status[gone]
    unfit = submit.cell("seed=1008")
    failure, host = status[unfit]["failure"], submit.rank_record(unfit, 1)["host"]
    assert (failure["kind"], failure["status"], failure["host"]) == ("node", 79, host), failure
    assert f"{host}: a matmul of device 0 (cpu) gave wrong numbers" in failure["line"], failure
    assert submit.processes() == []

    submit.heal()
    of = {
        kind: {name for name, ending in endings.ENDINGS.items() if ending.failure == kind}
        for kind in ("out of memory", "killed", "hang", "not finite")
    }
    with submit.cluster.closed():  # only the chosen cells wait there
        assert submit.run(*submit.line(*sweep)).returncode != 0
        assert chosen(submit) == set()
        submit.run(*submit.line(*sweep, "launch.retry=oom"))
        assert chosen(submit) == of["out of memory"]
        submit.titan("resume", "runs", "--only", "killed")
        assert chosen(submit) == of["out of memory"] | of["killed"]
        submit.titan("resume", "runs", "--only", "hang", "--only", "nan", "--as-is")
        assert chosen(submit) == of["out of memory"] | of["killed"] | of["hang"] | of["not finite"]
        submit.run(*submit.line(*sweep, "launch.retry=failed"))
        assert chosen(submit) == set(endings.ENDINGS)
        submit.titan("resume", "runs", "--only", "node")
        assert submit.job(unfit, 2)["ExcNodeList"] == host
    submit.wait(lambda: submit.done(submit.cell(endings.override("has no device memory"))), seconds=120)


def chosen(submit) -> set[str]:
    """Return the endings whose cells have a second, waiting job."""
    waiting = {job.split("_")[0] for job in submit.cluster.active()}
    cells = {name: submit.cell(endings.override(name)) for name in endings.ENDINGS}
    return {
        name
        for name, run in cells.items()
        if (run / "attempts" / "2").exists() and submit.job_id(run, 2).split("_")[0] in waiting
    }


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
