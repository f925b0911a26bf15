"""Start launch.py as a user does: as a process in an empty folder, with real ranks and the real trainer."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kits import forked

ROOT = Path(__file__).parents[3]

# Runs code in the ranks of one test after the training loop has been imported.
SABOTAGE = """
import importlib.util, os, sys
class Finder:
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name != "titan_hydra.core.train.loop":
            return None
        sys.meta_path.remove(cls)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            trainer = sys.modules["titan_hydra.core.train.trainer"]
            exec({code!r}, {{"loop": module, "trainer": trainer, "rank": int(os.environ["RANK"]), "os": os}})
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Finder)
"""
AT_STEP_3 = """
update = trainer.Trainer.update
count = []
def sabotaged(self, *given):
    count.append(1)
    if len(count) == 3 and rank == {rank}:
        {action}
    update(self, *given)
trainer.Trainer.update = sabotaged
"""


class Launcher:
    """Start launch.py in a folder, and look at the files and processes that it leaves."""

    TINY = ("debug=tiny", "precision=fp32")
    ENDLESS = (*TINY, "steps=1000000", "checkpoint.interval=0", "metrics.log_every=20")
    ROOT = ROOT

    def __init__(self, folder: Path) -> None:
        self.folder, self.env = folder, {**os.environ, "OMP_NUM_THREADS": "1"}

    def start(self, *overrides: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "launch.py"), *overrides],
            cwd=self.folder,
            env=self.env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )

    def run(self, *overrides: str) -> subprocess.CompletedProcess:
        """Run launch.py to its end, in a fork where that is the same (tests/kits/forked.py)."""
        if forked.can_run(self.env):
            return forked.run("launch.py", overrides, self.folder, self.env)
        process = self.start(*overrides)
        out, err = process.communicate(timeout=300)
        return subprocess.CompletedProcess(overrides, process.returncode, out, err)

    def python(self, *arguments: str) -> subprocess.CompletedProcess:
        if arguments[:2] == ("-m", "titan_hydra.cli") and forked.can_run(self.env):
            return forked.run("titan", arguments[2:], self.folder, self.env)
        return subprocess.run(
            [sys.executable, *arguments], cwd=self.folder, env=self.env, text=True, capture_output=True, timeout=300
        )

    def page(self, name: str, *more: str, section: str = "") -> Iterator[tuple[str, subprocess.CompletedProcess]]:
        """Run the lines of the blocks marked `sh` in a page of docs/, or in the section of it whose heading begins
        with `section`; `more` is added to the lines that start launch.py. A line's comment names its exit status if
        this is not 0; runs/NAME-HASH in a line means the run of this name. Yield each line and its finished process.
        """
        _, found, text = (ROOT / "docs" / name).read_text().partition(f"\n## {section}")
        assert found, section
        if section:
            text = text.partition("\n## ")[0]
        blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
        for line in "".join(blocks).replace("\\\n    ", "").splitlines():
            typed = line
            for run in self.folder.glob("runs/*-*"):
                typed = typed.replace(f"{run.name.rpartition('-')[0]}-HASH", run.name)
            program, *words = shlex.split(typed, comments=True)
            if program == "titan":
                words = ["-m", "titan_hydra.cli", *words]
            elif words[0] == "launch.py":
                words = [str(ROOT / "launch.py"), *words[1:], *more]
            done = self.python(*words)
            status = re.search(r"# exit status (\d+)", line)
            assert done.returncode == int(status[1] if status else 0), line + done.stdout + done.stderr
            yield line, done

    def sabotage(self, code: str) -> None:
        """Run `code` in every rank once the training loop is imported; the code can use `loop`, `trainer`, `rank` and
        `os`.
        """
        folder = self.folder.parent / f"{self.folder.name}-sabotage"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(SABOTAGE.format(code=code))
        self.env["PYTHONPATH"] = str(folder)

    def sabotage_step_3(self, rank: int, action: str) -> None:
        self.sabotage(AT_STEP_3.format(rank=rank, action=action))

    def heal(self) -> None:
        self.env.pop("PYTHONPATH", None)

    @property
    def run_directory(self) -> Path:
        (directory,) = (path for path in (self.folder / "runs").iterdir() if not path.name.startswith("_"))
        return directory

    def attempt(self, number: int = 1) -> Path:
        return self.run_directory / "attempts" / str(number)

    def rank(self, rank: int, attempt: int = 1) -> dict:
        return json.loads((self.attempt(attempt) / f"rank_{rank}.json").read_text())

    def wait_for_step(self, step: int = 20, attempt: int = 1) -> None:
        self.wait(lambda: json.loads((self.attempt(attempt) / "status.json").read_text())["step"] >= step)

    def wait(self, condition, seconds: float = 300) -> None:
        """Wait until a condition is true; while a file or row does not exist, it counts as false. The limit ends waits
        for a condition that never becomes true.
        """
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            try:
                if condition():
                    return
            except (OSError, ValueError, IndexError):
                pass
            time.sleep(0.05)
        raise AssertionError(f"not so within {seconds} s")

    def processes(self) -> list[int]:
        """Return every process that works in this folder: launcher, parent of the ranks, ranks, their helpers."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "cwd").readlink() == self.folder and (entry / "stat").read_text().rsplit(")", 1)[1].split()[
                    0
                ] != "Z":
                    found.append(int(entry.name))
            except OSError:
                continue
        return found


@pytest.fixture(scope="module")
def launcher_of_module(tmp_path_factory):
    """Return one launcher for all tests of a file, which examine what it has run."""
    yield from a_launcher(tmp_path_factory.mktemp("module"))


@pytest.fixture
def launcher(tmp_path):
    yield from a_launcher(tmp_path)


def a_launcher(place: Path):
    folder = place / "work"
    folder.mkdir()
    launcher = Launcher(folder.resolve())
    yield launcher
    for process in launcher.processes():
        os.kill(process, signal.SIGKILL)
