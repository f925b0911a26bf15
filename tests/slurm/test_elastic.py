"""An elastic run on eight nodes loses nodes and gets them back: it goes on in the largest layout that fits the nodes that
are left, grows again, and makes each step once with the losses of the undisturbed run.
"""

import json
import random

import pytest

from tests.core.train.fault_tolerance.test_replicas import slow_steps

from .conftest import desk, running

STEPS = 50
BATCH = 168  # samples: 8, 7, 6 and 4 ranks have whole shares
DATA = (f"data.global_batch={BATCH}", "data.seq_len=16")
LAYOUTS = (  # nodes (of one rank each), the words of the layout, its parallelism
    (8, "gpus=8 parallelism=fsdp data.local_batch=21", "fsdp"),
    (7, "gpus=7 parallelism=fsdp data.local_batch=24", "fsdp"),
    (6, "gpus=6 parallelism=fsdp_tp data.local_batch=56", "fsdp_tp"),
    (4, "gpus=4 parallelism=fsdp_pp data.local_batch=84", "fsdp_pp"),
)
LINE = (
    *LAYOUTS[0][1].split(),
    *DATA,
    "cluster.gpus_per_node=1",
    "checkpoint.interval=10",
    f"elastic={[words for _, words, _ in LAYOUTS[1:]]}",
)


@pytest.fixture(scope="module")
def eight():
    with running(nodes=8) as cluster:
        yield cluster


@pytest.fixture
def submit(eight, tmp_path):
    with desk(eight, tmp_path / "work") as submitter:
        yield submitter


def rows(run, name):
    return [json.loads(line) for line in (run / f"{name}.jsonl").read_text().splitlines()]


def ranks(run, attempt):
    """Return the number of ranks that have started in an attempt."""
    return len([*run.glob(f"attempts/{attempt}/rank_*.json")])


def newest(run):
    """Return the number of the newest attempt in which a rank has started."""
    return max(int(path.parent.name) for path in run.glob("attempts/*/rank_*.json"))


def goes_on(submit, run):
    """Wait until the newest attempt has saved two steps of its own."""
    submit.wait(lambda: [*run.glob("attempts/*/rank_*.json")], 300)
    attempt = newest(run)
    began = max(submit.step(run, earlier) for earlier in range(attempt))
    submit.wait(lambda: newest(run) > attempt or submit.step(run, attempt) > max(began, 0) + 1, 400)


def learned_the_same(submit, run, steps):
    """Check that a run has made each step once, with the losses of one process that nothing disturbs."""
    assert [row["step"] for row in rows(run, "metrics")] == list(range(1, steps + 1))
    submit.heal()
    line = (*submit.TINY, "cluster=inline", "parallelism=single", *DATA, "data.local_batch=168", f"steps={steps}")
    alone = submit.start(*line, "name=alone", "paths.runs=alone")
    _, errors = alone.communicate(timeout=900)
    assert alone.returncode == 0, errors
    (whole,) = submit.folder.glob("alone/alone-*")
    for row, other in zip(rows(run, "metrics"), rows(whole, "metrics"), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5), (row, other)


@pytest.mark.slow
def test_a_node_is_down_for_good_then_up_again(submit):
    submit.sabotage(slow_steps(2))
    submit.submit(*LINE, f"steps={STEPS}", "cluster.grow_minutes=1")
    (run,) = submit.cells()
    submit.wait(lambda: submit.step(run) > 6, 300)
    assert ranks(run, 1) == 8 and submit.job(run)["NumNodes"] == "8", submit.story()
    submit.cluster.manage("crash", "node5")
    submit.wait(lambda: submit.step(run, 2) > 0, 300)
    job = submit.job(run, 2)
    assert (ranks(run, 2), job["NumNodes"], job["Restarts"]) == (7, "7", "1"), submit.story()
    assert submit.titan("status").stdout.count("running")
    submit.cluster.manage("boot", "node5")
    submit.wait(lambda: submit.step(run, 3) > 0, 400)
    assert (ranks(run, 3), submit.job(run, 3)["Restarts"]) == (8, "2"), submit.story()
    (submit.folder / "seen").touch()
    submit.settle(400)
    assert submit.done(run), submit.story()
    assert [event["gpus"] for event in rows(run, "events") if event["event"] == "layout"] == [8, 7, 8]
    learned_the_same(submit, run, STEPS)


@pytest.mark.slow
def test_twenty_nodes_are_lost_at_random_and_no_step_with_them(submit):
    """One to three nodes lose their power at once, whichever they are; some time later they are there again."""
    chance, lost, every = random.Random(5), 0, {f"node{number}" for number in range(8)}
    submit.sabotage(slow_steps(2))
    submit.submit(*LINE, "steps=80", "checkpoint.interval=2", "cluster.grow_minutes=1")
    (run,) = submit.cells()
    up = every
    while lost < 20:
        goes_on(submit, run)
        gone = chance.sample(sorted(up), min(chance.choice((1, 2, 3)), len(up) - 4, 20 - lost))
        lost, up, before = lost + len(gone), up - {*gone}, newest(run)
        submit.cluster.manage("crash", *gone)
        submit.wait(lambda before=before: newest(run) > before, 400)
        if len(up) < 7:
            submit.cluster.manage("boot", *(every - up))
            up = every
    (submit.folder / "seen").touch()
    submit.settle(900)
    assert submit.done(run), submit.story()
    learned_the_same(submit, run, 80)
