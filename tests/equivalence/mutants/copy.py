"""A copy of the package in which mutants are planted one at a time. The running tree is never changed. Imports no torch."""

from __future__ import annotations

import compileall
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

from .mutant import Mutant

ROOT = Path(__file__).parents[3]
COPIED = ("titan_hydra", "conf", "sweeps", "tests", "docs", "benchmarks", "launch.py")  # tests use all of them
START, PER_CASE, PER_TEST = 60, 90, 600  # seconds after which a request or a test counts as hanging, on a busy machine


class Copy:
    """The copy, and the server that runs cases in it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="titan-mutants-"))
        leave = shutil.ignore_patterns("__pycache__")
        for place in (ROOT / name for name in COPIED):
            if place.is_dir():
                shutil.copytree(place, self.folder / place.name, ignore=leave)
            else:
                shutil.copy(place, self.folder)
        # Bytecode is checked by the hash of its source, not by its date: a file may be changed and restored before the
        # file system's clock advances.
        mode = PycInvalidationMode.CHECKED_HASH
        compileall.compile_dir(self.folder / "titan_hydra", quiet=2, invalidation_mode=mode)
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(self.folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        self.log = (self.folder / "server.log").open("w")
        self.server = subprocess.Popen(
            [sys.executable, "-m", "tests.equivalence.mutants.server"],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )

    def close(self) -> None:
        """End the server and delete the copy."""
        self.server.communicate()
        self.log.close()
        shutil.rmtree(self.folder)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Plant a mutant while the block runs."""
        target = self.folder / "titan_hydra" / mutant.file
        text = target.read_text()
        target.write_text(mutant.planted_in(text))
        try:
            yield
        finally:
            target.write_text(text)

    def run(self, cases: Sequence[str], steps: int) -> dict[str, Any]:
        """Return the server's answer for cases: their outcomes, or the error that ended all of them."""
        request = {
            "cases": list(cases),
            "steps": steps,
            "out": str(self.folder / "answer.json"),
            "seconds": START + PER_CASE * len(cases),
        }
        assert self.server.stdin is not None and self.server.stdout is not None
        self.server.stdin.write(json.dumps(request) + "\n")
        self.server.stdin.flush()
        return json.loads(self.server.stdout.readline())

    def fails(self, test: str) -> bool | None:
        """Whether a test fails in the copy, or cannot be run; None if it has not ended after PER_TEST seconds, which proves
        nothing on a busy machine.
        """
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-o",
            "addopts=",
            "--import-mode=importlib",
            "-p",
            "no:cacheprovider",
        ]
        options: dict[str, Any] = {
            "cwd": self.folder,
            "env": self.environment,
            "capture_output": True,
            "check": False,
            "timeout": PER_TEST,
        }
        try:
            return subprocess.run([*command, "--tb=no", test], **options).returncode != 0
        except subprocess.TimeoutExpired:
            return None
