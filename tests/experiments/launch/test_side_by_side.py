"""Cells run side by side, each on devices of its own: real ranks on devices that are only named, and on CPUs."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.experiments.launch.conftest import Launcher

SHORT = (*Launcher.TINY, "steps=40", "metrics.log_every=10", "checkpoint.interval=0", "gpus=1")
ENDLESS = (*Launcher.ENDLESS, "gpus=1")


@pytest.fixture
def box(launcher, tmp_path):
    """A machine with four devices, which the ranks do not find, and a temporary folder of its own."""
    (tmp_path / "tmp").mkdir()
    launcher.env |= {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "TMPDIR": str(tmp_path / "tmp")}
    return launcher


def runs(launcher) -> list[Path]:
    return sorted(path for path in (launcher.folder / "runs").glob("*-*") if path.name[0] not in "._")


def rank_of(run: Path, attempt: int = 1) -> dict:
    return json.loads((run / f"attempts/{attempt}/rank_0.json").read_text())


def seen(run: Path, name: str) -> str:
    """Return an environment variable of a running rank, as the kernel has it."""
    content = Path(f"/proc/{rank_of(run)['pid']}/environ").read_bytes().decode()
    return dict(entry.split("=", 1) for entry in content.split("\0") if "=" in entry).get(name, "")


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def all_train(launcher, count: int, attempt: int = 1) -> None:
    launcher.wait(lambda: len(runs(launcher)) >= count)
    launcher.wait(
        lambda: (
            sum(
                json.loads((run / f"attempts/{attempt}/status.json").read_text())["step"] > 20 for run in runs(launcher)
            )
            >= count
        )
    )


def test_four_cells_at_once_have_a_device_each_and_a_second_launcher_waits(box):
    process = box.start("-m", *ENDLESS, "seed=1,2,3,4")
    all_train(box, 4)
    assert sorted(seen(run, "CUDA_VISIBLE_DEVICES") for run in runs(box)) == ["4", "5", "6", "7"]
    other = box.start(*ENDLESS, "seed=5")  # a second launcher, which finds no device
    assert "waits for 1 device of 4; device 4: run" in other.stdout.readline()
    four = runs(box)
    assert len(four) == 4, "nothing is claimed while it waits"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert out.count("asking the rank to save and stop") == 4 and out.count("interrupted") == 4
    assert all(len(list((run / "checkpoints").iterdir())) == 1 for run in four)
    assert "on device" in other.stdout.readline(), "its turn has come"
    other.send_signal(signal.SIGINT)
    assert other.communicate(timeout=300) and other.returncode == 130
    assert box.processes() == []
    assert len(json.loads((four[0] / "attempts/1/ranks.json").read_text())["beside"]) >= 3


def test_losses_do_not_depend_on_what_runs_beside(box):
    assert box.run("-m", *SHORT, "seed=1,2", "name=beside").returncode == 0
    assert box.run("-m", *SHORT, "seed=1,2", "name=alone", "cluster.max_parallel=1").returncode == 0
    found = {run.name.partition("-")[0]: [] for run in runs(box)}
    for run in runs(box):
        seed = json.loads((run / "config.json").read_text())["seed"]
        found[run.name.partition("-")[0]].append((seed, steps(run), losses(run)))
    assert sorted(found["beside"]) == sorted(found["alone"]) and len(found["alone"]) == 2
    noted = [json.loads((run / "attempts/1/ranks.json").read_text()).get("beside") for run in runs(box)]
    assert [names and len(names) for names in noted] == [None, None, 1, 1]


def test_cells_of_two_ranks_have_two_devices_each(box):
    process = box.start("-m", *ENDLESS[:-1], "gpus=2", "seed=1,2,3")
    all_train(box, 2)
    assert sorted(seen(run, "CUDA_VISIBLE_DEVICES") for run in runs(box)) == ["4,5", "6,7"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "new" in out and len(runs(box)) == 2, err


def test_two_on_cpus_survive_a_killed_rank_a_killed_launcher_and_a_frozen_rank(box):
    box.env["CUDA_VISIBLE_DEVICES"] = ""
    line = ("-m", *ENDLESS, "seed=1,2", "cluster.max_parallel=2", "launch.retry=failed")
    process = box.start(*line)
    all_train(box, 2)
    one, two = runs(box)
    os.kill(rank_of(one)["pid"], signal.SIGKILL)
    box.wait(lambda: "killed by signal 9" in process.stderr.readline())
    process.kill()  # the other cell goes on without its launcher
    process.communicate()
    before = json.loads((two / "attempts/1/status.json").read_text())["step"]
    box.wait(lambda: json.loads((two / "attempts/1/status.json").read_text())["step"] > before + 20)

    process = box.start(*line)  # attaches to one cell, and starts the other again beside it
    box.wait(lambda: json.loads((one / "attempts/2/status.json").read_text())["step"] > 20)
    assert not (two / "attempts/2").exists()
    os.kill(rank_of(two)["pid"], signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    box.wait(lambda: rank_of(one, 2).get("exit_status") == 75)  # a frozen rank does not keep others from saving
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert "attached to it" in out and "killing all ranks" in out
    assert len(list((one / "checkpoints").iterdir())) == 1 and box.processes() == []


def test_a_failed_cell_stops_the_others_only_if_asked(box):
    box.sabotage_step_3(0, "if self.job.seed == 1: raise ValueError('unlucky')")
    done = box.run("-m", *SHORT, "seed=1,2")
    assert done.returncode == 1 and "ValueError: unlucky" in done.stderr and "seed=2  done" in done.stdout
    process = box.start("-m", *ENDLESS, "seed=2,1,3", "cluster.max_parallel=2", "launch.stop_at_failure=true")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 1, err
    states = {line.split()[1]: line.split()[2] for line in out.splitlines() if " seed=" in line and "[" not in line}
    assert states["seed=2"] == "interrupted" and states["seed=3"] == "new" and "stop_at_failure" in err


def test_a_search_gives_each_trial_a_device(box):
    search = ("search=optuna", "search.trials=2", "search.parallel=2", "search.confirm=0", "validation=on")
    line = ("-m", *SHORT, *search, "validation.steps=1", "optimizer.lr=interval(1e-4,1e-3)")
    process = box.start(*line)
    box.wait(lambda: len(runs(box)) == 2 and all(rank_of(run) for run in runs(box)))
    devices = {seen(run, "CUDA_VISIBLE_DEVICES") for run in runs(box)}
    err = process.communicate(timeout=300)[1]
    assert process.returncode == 0, err
    assert len(devices) == 2 and devices < {"4", "5", "6", "7"}
    refused = box.run(*line, "search.parallel=5")
    assert refused.returncode == 2 and "search.parallel=5" in refused.stderr and "4" in refused.stderr


def test_what_cannot_be_is_refused_or_said(box):
    for typed, key in (
        ("launch.packed=true", "launch.packed=true"),
        ("cluster.max_parallel=-1", "cluster.max_parallel=-1"),
        ("cluster.max_parallel=1,2", "cluster.max_parallel=[1,2]"),
    ):
        refused = box.run("-m", *SHORT, "seed=1,2", typed)
        assert refused.returncode == 2 and key in refused.stderr, typed
    refused = box.run("-m", *SHORT, "seed=1,2", "cluster=inline", "cluster.max_parallel=2")
    assert refused.returncode == 2 and "cluster.max_parallel=2" in refused.stderr
    box.env["CUDA_VISIBLE_DEVICES"] = ""
    refused = box.run("-m", *SHORT, "seed=1,2", "cluster.max_parallel=9999")
    assert refused.returncode == 2 and "cluster.max_parallel=9999" in refused.stderr
    assert not (box.folder / "runs").exists()
    shown = box.run("-m", *SHORT, "seed=1,2", "cluster.max_parallel=2", "launch.mode=dry")
    assert "2 at a time on the CPUs" in shown.stdout
