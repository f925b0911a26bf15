"""Make run directories and sweeps as launcher and trainer leave them, with numbers that a test chooses."""

import copy
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from titan_hydra import cli
from titan_hydra.core.job.config import to_dict
from titan_hydra.experiments.compose.compose import compose_job

HERE = Path(__file__).parent


class Sweep:
    """A sweep in a folder `runs`, which is filled cell by cell, and `titan report` on it."""

    def __init__(self, runs: Path, base: dict, name: str = "table") -> None:
        self.runs, self.base, self.name, self.cells = runs, base, name, []

    def cell(
        self,
        name,
        changes=None,
        losses=None,
        result=None,
        rates=(),
        env=None,
        swept=True,
        repeat=False,
        failure=None,
        pipelined=False,
    ):
        """Add a cell. `changes` are dotted keys; `losses` and `rates` become rows; without `result` the run is not
        done; with `pipelined` it has a recorded schedule of two ranks.
        """
        config, directory = (
            copy.deepcopy(self.base),
            self.runs / f"{name.replace(' ', '_').replace(',', '')}-{self._hash(name)}",
        )
        for key, value in (changes or {}).items():
            *path, last = key.split(".")
            node = config
            for part in path:
                node = node[part]
            node[last] = value
        overrides = ["+sweeps=table", f"sweep.cell={name}"] + [
            f"{key}={value}" for key, value in (changes or {}).items() if swept
        ]
        self.cells.append(
            {"name": name, "overrides": overrides, "hash": self._hash(name), "directory": directory.name}
            | ({"repeat": True} if repeat else {})
        )
        directory.mkdir(parents=True)
        self._write(directory / "config.json", config)
        self._write(
            directory / "env.json",
            {"git_sha": "0123456789abcdef", "git_diff": "", "git_untracked": [], "versions": {}} | (env or {}),
        )
        (directory / "overrides.txt").write_text("\n".join(overrides) + "\n")
        rows = [
            {"step": step, "loss": loss, "tokens_per_second": rate, "memory_reserved_gib": None, "mfu": None}
            for step, (loss, rate) in enumerate(
                zip(losses or [5.0] * len(rates), rates or [100.0] * len(losses or ()), strict=True), start=1
            )
        ]
        (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        if pipelined:
            ranks = [[{"stage": stage, "kind": kind, "microbatch": 0} for kind in "FB"] for stage in range(2)]
            self._write(directory / "schedule.json", {"ranks": ranks})
        if result is not None:
            self._write(
                directory / "result.json",
                {
                    "status": "done",
                    "tokens_per_second_iqr": None,
                    "measured_steps": None,
                    "memory_gib": None,
                    "mfu": None,
                    "versions": {},
                    "world_size": config["gpus"],
                    "final_loss": losses[-1] if losses else None,
                    "git_sha": None,
                }
                | result,
            )
        if failure:
            (directory / "attempts/1").mkdir(parents=True)
            self._write(directory / "attempts/1/rank_0.json", failure)
        return directory

    def report(self, capsys, *arguments, baseline=None, target=None):
        """Write the manifest and run `titan report`; return its exit status, stdout and stderr."""
        folder = self.runs / "_sweeps" / f"{self.name}-1"
        folder.mkdir(parents=True, exist_ok=True)
        self._write(
            folder / "manifest.json",
            {
                "name": self.name,
                "created": 0,
                "command": ["+sweeps=table"],
                "baseline": baseline,
                "packed": False,
                "cells": self.cells,
                "arrays": [],
            },
        )
        status = cli.main(["report", target or self.name, "--runs", str(self.runs), *arguments])
        return (status, *capsys.readouterr())

    @staticmethod
    def _hash(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()[:8]

    @staticmethod
    def _write(path: Path, content: dict) -> None:
        path.write_text(json.dumps(content))


@pytest.fixture(scope="session")
def config():
    return to_dict(compose_job())


@pytest.fixture(scope="session")
def new_sweep(config):
    """Return a function that makes a sweep in a folder."""
    return lambda runs: Sweep(runs, config)


@pytest.fixture
def sweep(tmp_path, new_sweep):
    return new_sweep(tmp_path / "runs")


@pytest.fixture(scope="session")
def browser():
    """Start a real browser without a screen. Tests that need it are skipped if there is none; .ci/run installs it."""
    chromium, driver = (shutil.which(name) for name in ("chromium", "chromedriver"))
    if not (chromium and driver):
        missing = pytest.fail if os.environ.get("TITAN_REQUIRE_CHROMIUM") else pytest.skip
        missing("no chromium and chromedriver on this machine (apt-get install chromium chromium-driver)")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1400,1000",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()
