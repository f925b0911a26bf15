"""Test how a running job ends: Ctrl-C, kills, errors of one rank, launchers that die or are started twice. The ranks
are real, and no process may be left.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.kits import endings, wandb_file
from tests.kits.endings import ENDINGS
from titan_hydra.core.job.run.run import tracked_id

from .conftest import ROOT


def rows(launcher):
    return [json.loads(line)["step"] for line in (launcher.run_directory / "metrics.jsonl").read_text().splitlines()]


def test_first_interrupt_saves_and_the_same_line_resumes(launcher):
    process = launcher.start(*launcher.ENDLESS, "gpus=2")
    launcher.wait_for_step()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does, to launch.py and all processes of its process group
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "asking all 2 ranks to save and stop" in out and "Ctrl-C again kills" in out
    assert "the same command line resumes it" in err and "Traceback" not in out + err
    assert launcher.processes() == []
    saved = [path.name for path in (launcher.run_directory / "checkpoints").iterdir()]
    assert len(saved) == 1
    stopped_at = int(saved[0].removeprefix("step-"))

    process = launcher.start(*launcher.ENDLESS, "gpus=2")
    launcher.wait_for_step(stopped_at + 5, attempt=2)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert f"steps {stopped_at + 1} to 1000000" in out
    assert launcher.processes() == []
    first, second = ({file.name for file in launcher.attempt(number).iterdir()} for number in (1, 2))
    assert second >= {"rank_0.json", "rank_1.json", "rank_1.log", "beat_1.json"}
    assert "rank_0.log" in first and not first & {"rank_1.json", "rank_1.log", "beat_1.json"}, (
        "a stopped attempt is thinned by the next"
    )


def test_second_interrupt_kills(launcher):
    launcher.sabotage("loop.listen = lambda _: loop.signal.signal(loop.signal.SIGTERM, loop.signal.SIG_IGN)")
    process = launcher.start(*launcher.ENDLESS, "gpus=2")
    launcher.wait_for_step()
    process.send_signal(signal.SIGINT)
    time.sleep(3)
    assert process.poll() is None  # the ranks ignore the signal
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130 and "killing all ranks" in out, err
    assert "the same command line resumes it" in err
    assert launcher.processes() == []


def test_interrupt_while_ranks_are_starting(launcher):
    process = launcher.start(*launcher.ENDLESS, "gpus=2")
    launcher.wait(lambda: launcher.attempt().exists())
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert launcher.processes() == []


def test_interrupt_before_the_trainer_listens_needs_no_patience(launcher):
    launcher.sabotage("import time; open(f'importing_{rank}', 'w'); time.sleep(1000)")
    process = launcher.start(*launcher.ENDLESS, "gpus=2", "cluster.stop_seconds=1000")
    launcher.wait(lambda: len(list(launcher.folder.glob("importing_*"))) == 2)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert launcher.processes() == []


def test_interrupt_ends_a_sweep(launcher):
    process = launcher.start("-m", *launcher.ENDLESS, "seed=1,2")
    launcher.wait_for_step()
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert [line.split()[2] for line in out.splitlines() if " seed=" in line and "[" not in line][1] == "new"
    assert launcher.processes() == []


# The default suite tries one ending of each class.
DEFAULT = ("raises", "is killed", "has no device memory", "raises that it diverges", "raises in the build")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in DEFAULT else pytest.mark.long) for n in ENDINGS])
def test_a_failure_is_named_and_ends_all_ranks(launcher, name):
    ending = ENDINGS[name]
    launcher.sabotage(endings.CODE)
    hang = f"comm.train_timeout_seconds={4 if ending.failure == 'hang' else 100}"
    failed = launcher.run(*launcher.ENDLESS, "gpus=2", endings.override(name), hang)
    assert failed.returncode == ending.status and ending.words in failed.stderr, (failed.returncode, failed.stderr)
    assert ("Traceback" in failed.stderr) == ("raise " in ending.act and ending.failure in ("bug", "out of memory"))
    assert "Traceback" not in failed.stdout and launcher.processes() == []
    status = launcher.python("-m", "titan_hydra.cli", "status", "runs", "--json")
    (row,) = json.loads(status.stdout)["cells"]
    endings.check(name, row)


def test_peers_of_a_dead_rank_are_ended(launcher):
    """The launcher also ends ranks that would never notice that another rank has died. Here these ranks sleep, instead
    of waiting for ever in a collective.
    """
    launcher.sabotage(
        "import time\nif rank != 1: trainer.Trainer.update = lambda self, *given: time.sleep(1000)\n"
        "else: trainer.Trainer.update = lambda self, *given: time.sleep(1) or os._exit(1)"
    )
    process = launcher.start(*launcher.ENDLESS, "gpus=3", "data.global_batch=6")
    launcher.wait(lambda: (launcher.attempt() / "rank_1.json").exists())
    launcher.wait(lambda: not os.path.exists(f"/proc/{launcher.rank(1)['pid']}"))
    launcher.wait(lambda: launcher.processes() == [])
    _, err = process.communicate(timeout=300)
    assert process.returncode == 1 and "rank 1 ended with status 1" in err
    assert "loop.py" in (launcher.attempt() / "rank_0.log").read_text()  # SIGQUIT printed where the killed rank was


def test_hang_is_a_timeout_and_names_who_did_not_notice(launcher):
    launcher.sabotage_step_3(1, "import time; time.sleep(1000)")
    failed = launcher.run(*launcher.ENDLESS, "gpus=2", "comm.train_timeout_seconds=2")
    assert failed.returncode == 77, failed.stderr
    assert "rank 1 was late at step 3, optimizer: it has not begun " in failed.stderr
    assert "in sabotaged" in (launcher.attempt() / "rank_1.log").read_text()
    assert launcher.processes() == []


def test_rank_that_dies_while_importing(launcher):
    launcher.sabotage("os._exit(3)")
    failed = launcher.run(*launcher.ENDLESS, "gpus=2")
    assert failed.returncode == 1 and "ended with status 3 and without a word" in failed.stderr
    folder = launcher.folder.parent / "early"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import os, sys\nif os.environ.get('TITAN_RANK') == '1':\n"
        "    print('no such module', file=sys.stderr, flush=True); os._exit(4)"
    )
    launcher.env["PYTHONPATH"] = str(folder)
    failed = launcher.run(*launcher.ENDLESS, "gpus=2", "seed=1")
    assert failed.returncode == 1, failed.stderr
    assert "no such module" in failed.stderr and "rank 1 ended with status 4" in failed.stderr
    assert launcher.processes() == []


def test_two_launchers_run_a_line_once(launcher):
    processes = [launcher.start(*launcher.TINY, "gpus=2", "steps=100") for _ in range(3)]
    texts = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], texts
    assert rows(launcher) == list(range(1, 101))
    assert [path.name for path in (launcher.run_directory / "attempts").glob("[0-9]*")] == ["1"]
    assert sum("100/100" in out for out, _ in texts) >= 1
    assert {path.name for path in (launcher.folder / "runs").iterdir()} == {launcher.run_directory.name, "_code"}


def test_ranks_outlive_their_launcher_and_the_line_attaches_again(launcher):
    first = launcher.start(*launcher.ENDLESS, "gpus=2")
    launcher.wait_for_step()
    first.kill()
    first.wait()
    second = launcher.start(*launcher.ENDLESS, "gpus=2")
    assert "attached to it" in second.stdout.readline()
    assert launcher.run(*launcher.ENDLESS, "gpus=2", "launch.force=true").returncode == 2
    launcher.wait_for_step(json.loads((launcher.attempt() / "status.json").read_text())["step"] + 20)
    second.send_signal(signal.SIGINT)
    _, err = second.communicate(timeout=300)
    assert second.returncode == 130 and "stopped after step" in err
    assert launcher.processes() == []


def test_power_cut_is_an_interruption(launcher):
    """Everything is killed at once, so no process can write how it ended."""
    process = launcher.start(*launcher.ENDLESS, "gpus=2", "checkpoint.interval=10")
    launcher.wait_for_step(30)
    for pid in launcher.processes():
        os.kill(pid, signal.SIGKILL)
    process.wait()
    launcher.wait(lambda: launcher.processes() == [])
    again = launcher.start(*launcher.ENDLESS, "gpus=2", "checkpoint.interval=10")
    launcher.wait_for_step(40, attempt=2)
    again.send_signal(signal.SIGINT)
    out, _ = again.communicate(timeout=300)
    assert "attempt 2" in out and "steps 1 to" not in out


@pytest.mark.slow
def test_time_limit_saves_and_stops(launcher):
    done = launcher.run(*launcher.ENDLESS, "gpus=1", "cluster.time_minutes=1")
    assert done.returncode == 75, done.stderr
    assert "stopped after step" in done.stderr and launcher.processes() == []


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_wandb_sees_one_run_with_rising_steps_after_kills(launcher, kills):
    line = (*launcher.TINY, "metrics=wandb", "metrics.log_every=1", "steps=60", "checkpoint.interval=8")
    launcher.sabotage(
        "import time; update = trainer.Trainer.update\n"
        # steps are slow, so that the run is killed before it ends
        "trainer.Trainer.update = lambda self, *given: (time.sleep(0.05), update(self, *given))"
    )
    for attempt in range(1, kills + 1):
        process = launcher.start(*line)
        launcher.wait_for_step(14 * attempt, attempt)
        for pid in launcher.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()
    done = launcher.run(*line)
    assert done.returncode == 0, done.stderr
    (folder,) = (launcher.run_directory / "wandb").glob("offline-run-*")
    assert folder.name.rpartition("-")[2] == tracked_id(launcher.run_directory)

    def steps():
        rows = (row["_step"] for file in folder.glob("*.wandb") for row in wandb_file.rows(file))
        return list(dict.fromkeys(rows))  # a step has two rows if a checkpoint was saved at it

    launcher.wait(lambda: steps() == list(range(1, 61)))  # wandb's own process writes a little later
    rows = [json.loads(row)["step"] for row in (launcher.run_directory / "metrics.jsonl").read_text().splitlines()]
    assert rows == list(range(1, 61))


def test_ranks_of_an_attempt_that_is_not_the_newest_stop_and_save_nothing(launcher):
    """Another host has taken over the run, as after a partition of the network; without this check the ranks of both
    hosts would write the same files.
    """
    process = launcher.start(*launcher.ENDLESS, "gpus=2", "checkpoint.interval=1000000")
    launcher.wait_for_step()
    shutil.copytree(launcher.attempt(1), launcher.attempt(1).with_name("1.bak"))  # not an attempt
    launcher.attempt(2).mkdir()
    launcher.wait(lambda: all("exit_status" in launcher.rank(rank) for rank in (0, 1)))
    process.communicate(timeout=300)
    for rank in (0, 1):
        record = launcher.rank(rank)
        assert record["exit_status"] == 2 and "attempt 2 has taken over" in record["error"]["message"], record
    assert not (launcher.run_directory / "checkpoints").exists() and launcher.processes() == []


def test_a_second_request_to_stop_does_not_interrupt_the_record_of_the_first(tmp_path):
    """A scheduler and a launcher may both ask a rank that has not begun to train; the rank still ends as stopped."""
    code = f"""
import os, signal
from titan_hydra.core.train import worker

def train(*_):
    os.kill(os.getpid(), signal.SIGTERM)

def write(file, record, original=worker.write_json):
    if "exit_status" in record:
        os.kill(os.getpid(), signal.SIGTERM)
    original(file, record)

worker._train, worker.write_json = train, write
worker.run_rank({str(tmp_path)!r}, 1)
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 75
    assert json.loads((tmp_path / "attempts/1/rank_0.json").read_text())["exit_status"] == 75
