"""Runs on the stand-in cluster: real kubectl, real ranks over gloo in pods. The slow tests disturb them."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.experiments.launch.conftest import Launcher
from tests.kits import endings
from tests.slurm.conftest import Submitter

from .kubelet import IMAGE

STEPS, INTERVAL = 40, 10
# A step takes a tenth of a second, most of it asleep, so that there is time to disturb it.
SLOW = """
import time
update = trainer.Trainer.update
trainer.Trainer.update = lambda self, *given: time.sleep(0.1) or update(self, *given)
"""
# Ranks wait while there is a file `hold` in their run directory.
HOLD = """
import sys
slow, hold = trainer.Trainer.update, sys.argv[1] + "/hold"
def held(self, *given):
    while os.path.exists(hold):
        time.sleep(0.1)
    slow(self, *given)
trainer.Trainer.update = held
"""
TWO = ("gpus=2", "cluster.gpus_per_node=1")


def test_two_pods_train_what_two_ranks_here_train(desk):
    out = desk.submit(*TWO, "launch.wait=true")
    (run,) = desk.cells()
    assert "1 done" in out and desk.done(run), out + desk.story()
    assert desk.state(run)["state"] == "done"
    nodes = json.loads((run / "attempts/1/nodes.json").read_text())["names"]
    assert len(nodes) == 2 and {desk.rank_record(run, rank)["host"] for rank in (0, 1)} == {
        re.sub("-[0-9a-f]{5}$", "", name) for name in nodes
    }
    here = desk.run(*desk.TINY, "gpus=2", "paths.runs=here")
    assert here.returncode == 0, here.stderr
    (other,) = (path.parent for path in (desk.folder / "here").glob("*/config.json"))
    assert other.name == run.name and desk.losses(run) == desk.losses(other)
    assert IMAGE in (run / "job.yaml").read_text()


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Return losses and gradient norms of an undisturbed run of two ranks on this machine."""
    launcher = Launcher(tmp_path_factory.mktemp("undisturbed"))
    done = launcher.run(*launcher.TINY, "gpus=2", f"steps={STEPS}", "optimizer.max_norm=1000")
    assert done.returncode == 0, done.stderr
    return Submitter.losses(launcher, launcher.run_directory)


def started(desk, kinds: dict, *more: str) -> dict[str, Path]:
    """Start a run of two pods for each kind, and wait until each is in training. Return the runs by kind. A kind's
    max_norm, which no gradient reaches, changes the identity and no loss.
    """
    desk.sabotage(SLOW + HOLD)
    desk.site.kubelet.gpus = dict.fromkeys(desk.site.kubelet.gpus, 64)
    norms = ",".join(str(1000 + number) for number in range(len(kinds)))
    desk.submit("-m", *TWO, f"steps={STEPS}", f"checkpoint.interval={INTERVAL}", f"optimizer.max_norm={norms}", *more)
    return {kind: desk.cell(f"optimizer.max_norm={1000 + number}") for number, kind in enumerate(kinds)}


def hash_of(run: Path) -> str:
    return run.name.rpartition("-")[2]


def delete_pod(desk, run: Path) -> None:
    pod, _ = desk.site.kubelet.container_of(hash_of(run), 1)
    subprocess.run(["kubectl", "delete", "pod", pod["metadata"]["name"], "--wait=false"], env=desk.env, check=True)


def suspend(desk, run: Path) -> None:
    """Suspend the Job, as Kueue does when it takes its quota away, and let it go on when its pods are gone."""
    (job,) = (
        job for job in desk.site.store.all("jobs") if job["metadata"]["labels"]["titan-hydra/run"] == hash_of(run)
    )
    job["spec"]["suspend"] = True
    desk.wait(lambda: not desk.site.kubelet.pods_of(job))
    assert desk.state(run)["state"] == "queued"
    job["spec"]["suspend"] = False


def cancel_and_again(desk, run: Path) -> None:
    done = desk.titan("stop", "-y", str(run))
    assert done.returncode == 0, done.stderr
    desk.wait(lambda: desk.state(run)["state"] == "interrupted")
    assert desk.state(run)["cancelled_by"]
    again = desk.titan("resume", str(run), "--only", "interrupted")
    assert again.returncode == 0, again.stderr


INTERRUPTIONS = {
    "preempt pod 1": lambda desk, run: desk.site.kubelet.preempt(hash_of(run), 1),
    "preempt pod 0": lambda desk, run: desk.site.kubelet.preempt(hash_of(run), 0),
    "delete a pod": delete_pod,
    "suspend": suspend,
    "cancel and retry": cancel_and_again,
    "power cut": lambda desk, run: desk.site.kubelet.lose(hash_of(run), 1),
}
LOSSES = {"power cut": INTERVAL}  # kinds that lose steps, and how many at most


@pytest.mark.slow
@pytest.mark.parametrize("kind", INTERRUPTIONS)
def test_interrupted_runs_lose_nothing(desk, expected, kind):
    """The run goes on as its next attempt, and its losses and norms are bitwise those of an undisturbed run."""
    (run,) = started(desk, {kind: None}).values()
    desk.wait(lambda: desk.step(run) >= 8)
    INTERRUPTIONS[kind](desk, run)
    desk.wait(lambda: desk.done(run), seconds=300)
    assert desk.attempts(run) == [1, 2] and desk.losses(run) == expected, desk.story()
    made, log = desk.step(run, 1), (run / "attempts/2/rank_0.log").read_text()
    lost = made - int(re.search(r"steps (\d+) to", log)[1]) + 1
    assert 0 <= lost <= LOSSES.get(kind, 0), lost
    assert desk.state(run)["state"] == "done"


def spend(desk, run: Path) -> None:
    desk.site.kubelet.preempt(hash_of(run), 1)


FAILURES = {  # what the cluster does to a run in training: the class of its failure, its exit status, a word of its reason
    "kill a pod": (lambda desk, run: desk.site.kubelet.kill(hash_of(run), 1), "killed", 1, "killed by signal 9"),
    "out of memory": (
        lambda desk, run: desk.site.kubelet.kill(hash_of(run), 1, "OOMKilled"),
        "out of memory", 76, "used more than its memory",
    ),
    "requeues spent": (spend, "preempted too often", 75, "cluster.max_requeues is reached"),
}  # fmt: skip


@pytest.mark.slow
def test_failures_are_named_and_end_the_job(desk):
    desk.sabotage(endings.CODE)
    desk.site.kubelet.gpus = dict.fromkeys(desk.site.kubelet.gpus, 64)
    for name, ending in endings.ENDINGS.items():  # one by one, as the ranks of all would need many cores
        hang = f"comm.train_timeout_seconds={endings.HANG if ending.failure == 'hang' else 100}"
        desk.submit(*TWO, f"steps={STEPS}", "cluster.max_requeues=0", endings.override(name), hang)
        run = desk.cell(endings.override(name))
        desk.settle()
        endings.check(name, desk.state(run))
        assert desk.attempts(run) in ([1], []) and len(list(run.glob("attempts/[0-9]*"))) == 1, desk.story()
        assert not desk.processes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_has_its_class_and_ends_the_job(desk, kind):
    act, name, status, words = FAILURES[kind]
    (run,) = started(desk, {kind: None}, "cluster.max_requeues=0").values()
    desk.wait(lambda: desk.step(run) >= 8)
    act(desk, run)
    desk.settle()
    (job,) = desk.site.store.all("jobs")
    assert job["status"]["conditions"][-1]["type"] == "Failed", desk.story()
    row = desk.state(run)
    assert row["state"] == "failed", (row, desk.story())
    failure = row["failure"]
    assert (failure["kind"], failure["status"]) == (name, status) and words in failure["line"], (failure, desk.story())
    assert desk.attempts(run) == [1] and len(list(run.glob("attempts/[0-9]*"))) == 1
    assert not desk.processes()


@pytest.mark.slow
def test_four_pods_train_and_are_preempted_together(desk):
    """Two of four pods are taken away at once; without room, the run waits and then goes on."""
    desk.sabotage(SLOW)
    here = desk.run(*desk.TINY, "gpus=4", "parallelism=fsdp", "steps=20", "paths.runs=here")
    assert here.returncode == 0, here.stderr
    desk.submit("gpus=4", "cluster.gpus_per_node=1", "parallelism=fsdp", "steps=20", "checkpoint.interval=5")
    (run,) = desk.cells()
    desk.wait(lambda: desk.step(run) >= 6)
    desk.site.kubelet.closed = set(desk.site.kubelet.gpus)
    for index in (1, 2):
        desk.site.kubelet.preempt(hash_of(run), index)
    desk.wait(lambda: "0 of 4 pods run" in (desk.state(run)["job"] or {}).get("reason", ""))
    assert desk.state(run)["state"] == "queued"
    desk.site.kubelet.closed = set()
    desk.wait(lambda: desk.done(run), seconds=300)
    (other,) = (path.parent for path in (desk.folder / "here").glob("*/config.json"))
    assert desk.losses(run) == desk.losses(other) and desk.attempts(run) == [1, 2]


@pytest.mark.slow
def test_the_server_goes_down_while_a_run_trains(desk, expected):
    """The ranks do not notice. The state is read from their files, and nothing is started."""
    (run,) = started(desk, {"one": None}).values()
    desk.wait(lambda: desk.step(run) >= 3)
    (run / "hold").touch()
    desk.site.store.down = True
    row = json.loads(desk.titan("status", "runs", "--json").stdout)
    assert (row["silent"], row["cells"][0]["state"]) == (["kubernetes"], "running"), row
    assert "kubernetes does not answer" in desk.titan("stop", "-y", str(run)).stderr
    desk.site.store.down = False
    (run / "hold").unlink()
    desk.wait(lambda: desk.done(run))
    assert desk.losses(run) == expected and desk.attempts(run) == [1]


@pytest.mark.slow
def test_cluster_check_says_what_works(desk):
    option = desk.folder / "conf" / "cluster"
    option.mkdir(parents=True)
    words = [word.removeprefix("+").removeprefix("cluster.").split("=", 1) for word in desk.SLURM[1:]]
    lines = [f"{key}: {value}" for key, value in words if key not in ("gpus_per_node", "stop_seconds")]
    (option / "mine.yaml").write_text(
        "\n".join(["name: mine", "executor: kubernetes", "gpus_per_node: 1", "stop_seconds: 40", *lines])
    )
    line = ("cluster", "check", "mine", "--config-dir", str(desk.folder / "conf"), "precision=fp32")
    done = desk.titan(*line)
    assert done.returncode == 0, done.stdout + done.stderr + desk.story()
    assert done.stdout.count(" yes ") == 3, done.stdout
    broken = desk.titan(*line, "cluster.python=/nowhere/python")
    assert broken.returncode == 1 and "status 127" in broken.stdout, broken.stdout + broken.stderr
