"""Run launch.py with a search in a process that is forked from the tests', so that it need not import torch anew."""

import contextlib
import multiprocessing as mp
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from titan_hydra.instruments.search.journal import Journal

TINY = (
    *("debug=tiny", "precision=fp32", "cluster=inline", "model.dim=16", "model.n_layers=1", "data.seq_len=16"),
    *("validation=on", "validation.steps=1", "validation.interval=1000", "metrics.log_every=1000"),
    *("lr_scheduler=constant", "checkpoint.interval=0", "search=optuna", "search.confirm=0"),
)
SPACE = ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "optimizer.weight_decay=interval(0,0.3)")
HALVING = ("steps=9", "search.pruner=halving", "search.first_steps=2", "search.trials=5")


class Searches:
    """A folder in which searches run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out"
        folder.mkdir(exist_ok=True)

    def start(self, *overrides: str) -> mp.Process:
        """Start launch.py -m with these overrides, and return its process."""
        process = mp.get_context("fork").Process(target=self._launch, args=(list(overrides),))
        process.start()
        return process

    def _launch(self, overrides: list[str]) -> None:
        from titan_hydra.experiments.launch.main import main

        os.setsid()
        os.chdir(self.folder)
        descriptor = os.open(self.out, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
        sys.argv = ["launch.py", "-m", *overrides]
        status = main()
        os._exit(status)

    def run(self, *overrides: str, status: int = 0) -> str:
        """Run launch.py -m to its end, and return what it printed."""
        self.out.unlink(missing_ok=True)
        process = self.start(*overrides)
        process.join(500)
        text = self.out.read_text()
        assert process.exitcode == status, text
        return text

    def killed_when(self, condition, *overrides: str) -> None:
        """Start launch.py -m, and kill it as soon as the condition holds."""
        process = self.start(*overrides)
        deadline = time.monotonic() + 300
        with contextlib.suppress(ProcessLookupError):
            while not condition() and process.is_alive():
                assert time.monotonic() < deadline
                time.sleep(0.002)
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL, self.out.read_text()

    @property
    def sweep(self) -> Path:
        (folder,) = (self.folder / "runs/_sweeps").iterdir()
        return folder

    @property
    def text(self) -> str:
        """The journal; "" before there is one."""
        with contextlib.suppress(ValueError, FileNotFoundError):
            return (self.sweep / "optuna.journal").read_text()
        return ""

    def trials(self):
        return Journal(self.sweep).trials()


@pytest.fixture
def searches(tmp_path):
    import titan_hydra.core.train.loop  # noqa: F401  (before the forks)

    return Searches(tmp_path / "one")
