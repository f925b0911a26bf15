"""Run whole sweeps on a real SLURM, from one command to the table: cells of one, two and four nodes, on clusters with
and without accounting.
"""

import shutil

import pytest

from .conftest import desk, running

# The rank of the cell with the first max_norm dies in step 3; the cell with the second one runs until somebody stops
# it. No gradient has so large a norm.
HARM = """
import time
update, count = trainer.Trainer.update, []
def harmed(self, *given):
    count.append(1)
    if len(count) == 3 and self.job.optimizer.max_norm == 1002:
        os.kill(os.getpid(), 9)
    if self.job.optimizer.max_norm == 1003:
        time.sleep(len(count) - 1 and 0.5)
    update(self, *given)
trainer.Trainer.update = harmed
"""


def train_a_sweep(submit, per_node: int) -> None:
    """Train cells of one, two and four nodes, in one array for each, to the end, and return their table."""
    shapes = {nodes * per_node: nodes for nodes in (1, 2, 4)}
    ranks = ",".join(map(str, shapes))
    out = submit.submit(
        "-m",
        f"gpus={ranks}",
        "seed=1,2",
        "steps=8",
        f"cluster.gpus_per_node={per_node}",
        "data.global_batch=32",
        "sweep.name=nodes",
    )
    assert "6 queued" in out or "running" in out, out
    jobs = {submit.job_id(submit.cell(f"gpus={count}", f"seed={seed}")) for count in shapes for seed in (1, 2)}
    assert len(jobs) == 6 and {
        len([job for job in jobs if job.split("_")[0] == array]) for array in {j.split("_")[0] for j in jobs}
    } == {2}
    submit.settle(seconds=240)
    for count, nodes in shapes.items():
        for seed in (1, 2):
            run = submit.cell(f"gpus={count}", f"seed={seed}")
            assert submit.done(run) and len(submit.losses(run)) == 8, submit.story()
            job = submit.job(run)
            assert (job["JobState"], job["NumNodes"]) == ("COMPLETED", str(nodes)), job
            ranks = list((run / "attempts" / "1").glob("rank_*.json"))
            assert len(ranks) == count
    report = submit.titan("report", "nodes")
    assert report.returncode == 0, report.stderr
    for count in shapes:
        assert f"gpus={count}" in report.stdout, report.stdout
    print(report.stdout)


def test_sweep_over_one_two_and_four_nodes(submit):
    train_a_sweep(submit, per_node=1)


@pytest.mark.slow
@pytest.mark.parametrize("accounting", ["shim", "none", "dbd"])
def test_sweep_on_nodes_of_four(tmp_path, accounting):
    with running(accounting=accounting) as cluster, desk(cluster, tmp_path / "work") as submit:
        train_a_sweep(submit, per_node=4)


@pytest.mark.slow
@pytest.mark.parametrize("accounting", ["none", "dbd"])
def test_what_became_of_jobs_that_slurm_has_forgotten(tmp_path, accounting):
    """One cell is done, one was killed, one was cancelled by somebody. Then the controller forgets all jobs, and titan
    looks only afterwards.
    """
    with running(accounting=accounting) as cluster, desk(cluster, tmp_path / "work") as submit:
        submit.sabotage(HARM)
        submit.submit("-m", "gpus=1", "optimizer.max_norm=1001,1002,1003", "steps=40")
        done, killed, cancelled = (submit.cell(f"optimizer.max_norm={norm}") for norm in (1001, 1002, 1003))
        submit.wait(lambda: submit.step(cancelled) > 0)
        cluster.call("scancel", submit.job_id(cancelled))
        submit.settle()
        cluster.manage("crash", "slurmctld")
        shutil.rmtree(cluster.home / "state")
        (cluster.home / "state").mkdir()
        cluster.up()
        assert cluster.jobs() == {}
        status = submit.status()
        assert status[done]["state"] == "done"
        assert (
            status[killed]["failure"]["kind"] == "killed"
            and "rank 0 was killed by signal 9" in status[killed]["failure"]["line"]
        )
        assert status[cancelled]["state"] == "interrupted", status[cancelled]
        report = submit.titan("report", "--allow", "optimizer")
        assert report.returncode == 0 and "killed" in report.stdout, report.stdout + report.stderr


@pytest.mark.slow
def test_max_parallel_holds_for_all_shapes_and_through_a_requeue(submit):
    """There are two cells of each of three shapes, and two cells may run at once. One is stopped and requeued while the
    next arrays wait.
    """
    submit.sabotage(
        "import time\nupdate = trainer.Trainer.update\n"
        "trainer.Trainer.update = lambda self, *given: time.sleep(0.2) or update(self, *given)"
    )
    submit.submit("-m", "gpus=1,2,4", "seed=1,2", "steps=30", "cluster.max_parallel=2", "data.global_batch=8")
    first = submit.cell("gpus=1", "seed=1")
    submit.wait(lambda: submit.step(first) > 3)
    submit.cluster.signal_job(submit.job_id(first), "USR2")
    submit.settle(300)
    moments = []
    for run in submit.cells():
        assert submit.done(run), submit.story()
        for attempt in submit.attempts(run):
            record = submit.rank_record(run, 0, attempt)
            moments += [(record["started"], 1), (record["ended"], -1)]
    at_once, running_now = [], 0
    for _, change in sorted(moments):
        running_now += change
        at_once.append(running_now)
    assert submit.attempts(first) == [1, 2] and max(at_once) == 2, (at_once, submit.story())
