"""Ranks on this machine: submitit's local executor, with a parent of our own for the ranks.

submitit's parent process shares the terminal's process group (Ctrl-C would kill the ranks within a second), hides GPUs, forgets exit
codes, and lets the ranks run on when one has died. `Ranks` has a session of its own, keeps what the user made visible, writes every
exit code to ranks.json, and ends the others when one fails. It outlives launch.py: after a closed terminal or `kill -9` of
launch.py the ranks go on, and the same command line attaches to them again.
"""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

from submitit.local.local import Controller, LocalExecutor, LocalJob

import titan_hydra

from . import worker
from .records import process, this_process, write_json

GRACE = 1.5  # seconds that the other ranks get to end by themselves after one has failed
GRACE_STOPPED = 60.0  # the same after a rank has stopped as asked to: the others may still be writing their checkpoint
LAST_MINUTE = 60  # seconds before the time limit at which the ranks are asked to save and stop (a tenth of the limit, if that is less)
YEAR = 365 * 24 * 60


def start(directory: Path, attempt: Path, ranks: int, time_minutes: int | None) -> subprocess.Popen:
    """Start all ranks of an attempt. Returns their parent process, which ends when all of them have."""
    executor = Executor(attempt / "submitit")
    executor.update_parameters(tasks_per_node=ranks, timeout_min=time_minutes or YEAR)
    return executor.submit(worker.run, str(directory), int(attempt.name))._process


class Executor(LocalExecutor):
    """submitit's local executor, but the parent of the ranks is `Ranks`, in a session of its own."""

    def _submit_command(self, command: str) -> LocalJob:
        ranks, seconds = self.parameters["tasks_per_node"], 60 * self.parameters["timeout_min"]
        environment = {
            **os.environ,
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_NTASKS": str(ranks),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(seconds),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": str(min(LAST_MINUTE, seconds // 10)),
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(titan_hydra.__file__).parents[1]), os.environ.get("PYTHONPATH")])),
            "PYTHONSAFEPATH": "1",  # ranks import what launch.py imported, whatever lies in the current folder
        }
        with open(Path(self.folder) / "parent.log", "ab") as log:
            parent = subprocess.Popen([sys.executable, "-m", __name__, str(self.folder)], env=environment, stdin=subprocess.DEVNULL,
                                      stdout=log, stderr=log, start_new_session=True)
        return LocalJob(folder=self.folder, job_id=str(parent.pid), process=parent, tasks=list(range(ranks)))


class Ranks(Controller):
    """Parent of all ranks: waits for them, records how they end, and lets none outlive a failed one."""

    def wait(self, freq: int = 20) -> list[int]:
        """Exit codes of all ranks. Called by submitit's `run` once they are started."""
        self.ranks = [process(task.pid) for task in self.tasks]
        self.record()
        started, deadline, asked = time.monotonic(), float("inf"), False
        while any(task.poll() is None for task in self.tasks) or any("ended" not in rank for rank in self.ranks):
            now = time.monotonic()
            for rank, task in zip(self.ranks, self.tasks, strict=True):
                if "ended" not in rank and task.poll() is not None:
                    rank.update(exit_status=task.returncode, ended=time.time())
                    self.record()
                    if task.returncode:
                        deadline = min(deadline, now + (GRACE_STOPPED if task.returncode == 75 else GRACE))
            if not asked and now > started + self.timeout_s - self.signal_delay_s:
                asked = True
                self._forward_signal(signal.SIGTERM)
            if now > min(deadline, started + self.timeout_s):
                self.end_others()
            time.sleep(1 / freq)
        return [task.returncode for task in self.tasks]

    def end_others(self) -> None:
        """SIGKILL to all that still run, as a rank inside a collective does nothing else; SIGQUIT first leaves its stack in its log."""
        for number in (signal.SIGQUIT, signal.SIGKILL):
            for rank, task in zip(self.ranks, self.tasks, strict=True):
                if task.poll() is None:
                    rank["killed"] = True
                    task.send_signal(number)
            time.sleep(0.3)

    def record(self) -> None:
        write_json(self.folder.parent / "ranks.json", {**this_process(), "ranks": self.ranks})


def main() -> None:
    """The ranks' parent process. At the end, whatever their helpers left in this process group (compile workers, loaders) goes too."""
    try:
        Ranks(Path(sys.argv[1])).run()
    except Exception:
        traceback.print_exc()  # into parent.log
    finally:
        sys.stderr.flush()
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
