"""SLURM interrupts jobs: each continues where it stopped, and its losses are bitwise those of an undisturbed run."""

import re
import time

import pytest

from .conftest import desk, running

# A step takes a tenth of a second, most of it asleep, so that there is time to disturb it; in cells with `limit` it
# takes half a second, because SLURM's signal comes late. In cells with `child`, each rank has a child process, like
# those of data loaders, forked after the trainer has installed its signal handlers, so that the child gets signals too.
SLOW = """
import time
update, listen = trainer.Trainer.update, loop.listen
def slow(self, *given):
    time.sleep({seconds} * (5 if self.job.optimizer.max_norm % 100 == 4 else 1))
    update(self, *given)
def with_child(self):
    listen(self)
    if 2 <= self.job.optimizer.max_norm % 100 < 3 and os.fork() == 0:
        time.sleep(300)
        os._exit(0)
trainer.Trainer.update, loop.listen = slow, with_child
"""
STEPS, INTERVAL = 120, 25
# The ways to disturb a cell. A cell's kind is its max_norm modulo 100; no gradient has so large a norm, so max_norm
# changes the cell's identity but no loss.
KINDS = ("requeue", "TERM and USR2", "child", "partition", "limit", "USR2", "nodes requeue", "nodes", "batch script")
SAVED = ("USR2", "TERM and USR2", "child", "nodes", "limit")  # kinds that leave enough time for a checkpoint


def disturb(submit, kind: str, job_id: str) -> None:
    """Interrupt a job that is training."""
    if kind == "USR2":
        submit.cluster.signal_job(job_id, "USR2")
    elif kind in ("TERM and USR2", "child", "nodes"):
        submit.cluster.signal_job(job_id, "TERM", "USR2")
    elif kind.endswith("requeue"):
        submit.cluster.call("scontrol", "requeue", job_id)
    elif kind == "batch script":
        submit.cluster.call("scancel", "--batch", "--signal=KILL", job_id)
    elif kind == "partition":
        node = submit.cluster.jobs()[job_id]["NodeList"]
        submit.cluster.call(
            "sbatch", "--partition=urgent", f"--nodelist={node}", "--exclusive", "--output=/dev/null", "--wrap=sleep 1"
        )
    elif kind == "limit":
        submit.cluster.call("scontrol", "update", f"jobid={job_id}", "EndTime=now+40")


@pytest.fixture(scope="module")
def expected(cluster, tmp_path_factory):
    """Return the losses of an undisturbed run on this machine, without SLURM."""
    with desk(cluster, tmp_path_factory.mktemp("undisturbed")) as submit:
        done = submit.run(*submit.TINY, "gpus=2", f"steps={STEPS}", "optimizer.max_norm=1000")
        assert done.returncode == 0, done.stderr
        losses = submit.losses(submit.run_directory)
    assert list(losses) == list(range(1, STEPS + 1))
    return losses


def drill(submit, expected, kinds, repeats: int, parallel: int = 0, seconds: float = 300) -> list:
    """Train a cell for every kind and repetition, disturb each, and compare all of them with one undisturbed run.
    Return the cells.
    """
    common = ("gpus=2", f"steps={STEPS}", f"checkpoint.interval={INTERVAL}")
    submit.sabotage(SLOW.format(seconds=0.1))
    numbers = {kind: [100 * repeat + KINDS.index(kind) for repeat in range(1, repeats + 1)] for kind in kinds}
    one = [number for kind in kinds if not kind.startswith("nodes") for number in numbers[kind]]
    two = [number for kind in kinds if kind.startswith("nodes") for number in numbers[kind]]
    for per_node, cells in ((4, one), (1, two)):
        if cells:
            submit.submit(
                "-m",
                *common,
                f"optimizer.max_norm={','.join(map(str, cells))}",
                f"cluster.gpus_per_node={per_node}",
                f"cluster.max_parallel={parallel}",
                f"paths.runs=runs/{per_node}",
            )
    waiting = {submit.cell(f"optimizer.max_norm={number}"): kind for kind in kinds for number in numbers[kind]}
    runs, hit = dict(waiting), {}
    deadline = time.monotonic() + seconds + 200 * len(runs) / (parallel or len(runs))
    while not all(map(submit.done, runs)):
        assert time.monotonic() < deadline, submit.story()
        states = {number: job["JobState"] for number, job in submit.cluster.jobs().items()}
        for index, (run, kind) in enumerate(list(waiting.items())):
            # not the first node if a job of higher priority took it
            attempt = max(submit.attempts(run), default=1)
            if states.get(submit.job_id(run)) == "RUNNING" and submit.step(run, attempt) >= 5 + index % 7 * 4:
                disturb(submit, kind, submit.job_id(run))
                hit[run] = attempt
                del waiting[run]
        time.sleep(0.3)
    assert not waiting, "too fast to be disturbed"
    told: dict[str, list] = {}
    for run, kind in runs.items():
        assert submit.losses(run) == expected, (kind, run.name)
        assert max(submit.attempts(run)) > hit[run], (kind, run.name, submit.story())
        told.setdefault(kind, []).append(lost(submit, run, hit[run]))
    for kind, steps in told.items():
        print(f"{kind}: {len(steps)} of {len(numbers[kind])} runs bitwise as undisturbed; steps made twice: {steps}")
        assert max(steps) == 0 if kind in SAVED else max(steps) < INTERVAL + 1, (kind, steps)
    return list(runs)


def lost(submit, run, attempt: int) -> int:
    """Return the steps of an attempt that the next attempt had to repeat."""
    logs = [
        (run / "attempts" / str(number) / "rank_0.log").read_text()
        for number in submit.attempts(run)
        if number > attempt
    ]
    # some attempts stop before they print this line
    first = next(int(found[1]) for log in logs if (found := re.search(r"steps (\d+) to", log)))
    return submit.step(run, attempt) - (first - 1)


def test_interrupted_jobs_lose_nothing(submit, expected):
    runs = drill(submit, expected, ("requeue", "TERM and USR2", "child", "USR2", "batch script", "nodes"), repeats=1)
    # Each disturbance hits one task of an array, and no other. The last task is special: SLURM knows it by the array's
    # own number.
    assert [submit.attempts(run) for run in runs] == [[1, 2]] * len(runs), submit.story()


@pytest.mark.slow  # takes more than a minute, because SLURM needs half a minute to notice that a node is gone
@pytest.mark.parametrize("victim", ["node0", "node1"])
def test_power_cut_goes_back_to_the_newest_complete_checkpoint(submit, expected, victim):
    """The power cut affects the host of the batch script, or another host of the job."""
    common = ("gpus=2", f"steps={STEPS}", "checkpoint.interval=10")
    submit.sabotage(SLOW.format(seconds=0.1))
    submit.submit(*common, "cluster.gpus_per_node=1")
    (run,) = submit.cells()
    submit.wait(lambda: submit.step(run) >= 25)
    assert submit.job(run)["BatchHost"] == "node0" and submit.job(run)["NodeList"] == "node[0-1]"
    submit.cluster.manage("crash", victim)
    submit.wait(lambda: submit.done(run), seconds=180)
    assert submit.attempts(run) == [1, 2] and submit.losses(run) == expected
    assert 0 <= lost(submit, run, 1) <= 10


@pytest.mark.slow
def test_a_stop_before_training_is_requeued(submit):
    """The first signal may arrive while a rank writes its first record."""
    with submit.cluster.closed():
        submit.submit("gpus=2", "cluster.gpus_per_node=1", "parallelism=fsdp")
    (run,) = submit.cells()
    submit.wait(lambda: submit.job(run)["JobState"] == "RUNNING" and (run / "attempts/1/job").exists())
    submit.wait(lambda: (run / "attempts/1/rank_0.json").exists(), poll=0.05)
    submit.cluster.signal_job(submit.job_id(run), "TERM")
    submit.wait(lambda: submit.done(run), seconds=120)
    assert (run / "attempts/1/exit").read_text() == "75\n" and (run / "attempts/2").exists(), submit.story()


@pytest.mark.slow  # srun waits for a minute
def test_power_cut_that_slurm_notices_late(expected, tmp_path):
    """By default SLURM gives up a node after 300 s. The other ranks have ended long before, and the job must be
    requeued.
    """
    with running(node_timeout=300) as cluster, desk(cluster, tmp_path / "work") as submit:
        submit.sabotage(SLOW.format(seconds=0.1))
        submit.submit("gpus=2", f"steps={STEPS}", "checkpoint.interval=10", "cluster.gpus_per_node=1")
        (run,) = submit.cells()
        submit.wait(lambda: submit.step(run) >= 25)
        submit.cluster.manage("crash", "node1")
        submit.wait(lambda: (run / "attempts/1/exit").read_text() == "79\n", seconds=150)
        submit.cluster.manage("boot", "node1")
        submit.wait(lambda: submit.done(run), seconds=180)
        assert submit.attempts(run) == [1, 2] and submit.losses(run) == expected
        assert 0 <= lost(submit, run, 1) <= 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_interrupted_jobs_lose_nothing_ten_times(submit, expected, kind):
    drill(submit, expected, (kind,), repeats=10, parallel=5)


@pytest.mark.slow
def test_a_site_that_preempts_with_term_alone(expected, tmp_path):
    """Most sites do so; the ranks treat SIGTERM as a preemption."""
    with running(preempt_signal="term") as cluster, desk(cluster, tmp_path / "work") as submit:
        drill(submit, expected, ("partition",), repeats=2)


@pytest.mark.slow  # a requeued job waits for two minutes
def test_interrupted_jobs_lose_nothing_with_slurms_own_timeouts(expected, tmp_path):
    with running(timeouts="slurm") as cluster, desk(cluster, tmp_path / "work") as submit:
        drill(submit, expected, KINDS, repeats=1, seconds=570)


@pytest.mark.slow  # SLURM gives up the node after five minutes
def test_power_cut_of_the_batch_host_with_slurms_own_timeouts(expected, tmp_path):
    with running(timeouts="slurm") as cluster, desk(cluster, tmp_path / "work") as submit:
        submit.sabotage(SLOW.format(seconds=0.1))
        submit.submit("gpus=2", f"steps={STEPS}", "checkpoint.interval=10", "cluster.gpus_per_node=1")
        (run,) = submit.cells()
        submit.wait(lambda: submit.step(run) >= 25)
        submit.cluster.manage("crash", submit.job(run)["BatchHost"])
        submit.wait(lambda: submit.done(run), seconds=800, poll=2)
        assert submit.attempts(run) == [1, 2] and submit.losses(run) == expected
        assert 0 <= lost(submit, run, 1) <= 10
