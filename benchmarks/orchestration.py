"""Measure how long the commands on a login node take, and compare this with limits: python benchmarks/orchestration.py

The commands are `--help`, dry runs of 96 cells (four layouts with 24 seeds, and every combination of three groups), the
submission of 96 cells to a SLURM on this machine, and `titan status` over 500 run directories.
tests/slurm/slurm-cluster starts this SLURM, whose jobs are held and then cancelled. The submission is left out if SLURM
is not installed. Each command is a process as a user starts it. The exit status is 1 if a command takes longer than its
limit, fails, or has imported torch. The load of the machine is printed beside the times, as the limits are for an idle
machine.
"""

import argparse
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from titan_hydra.core.base.errors import Exit, Stopped
from titan_hydra.core.job.config.files import write_json, write_text
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.run.failure import describe
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.runs import rundir

ROOT = Path(__file__).parents[1]
LAUNCH, TITAN = [str(ROOT / "launch.py")], ["-m", "titan_hydra.cli"]
CELLS = ["-m", "seed=range(24)", "parallelism=ddp,fsdp,tp,pp", "gpus=2", "debug=tiny", "data.local_batch=4"]
GROUPS = [
    "-m",
    "parallelism=ddp,fsdp,hsdp,tp,pp,cp",
    "precision=bf16,bf16_full,fp32,float8_emulate",
    "ac=none,full,op,lean",
    *CELLS[3:],
]
LIMITS = {
    "--help": 1.0,
    "dry run of 96 cells": 5.0,
    "dry run of 96 cells, three groups": 5.0,
    "submission of 96 cells to SLURM": 40.0,
    "titan status of 500 runs": 1.5,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--slurm-cluster",
        type=Path,
        default=ROOT / "tests" / "slurm" / "slurm-cluster",
        help="script that starts a SLURM",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="orch-") as name:
        folder = Path(name)
        help, dry, groups, submission, status = LIMITS
        make_runs(folder / "runs500", 500)
        found = {
            help: measure(folder, [*LAUNCH, "--help"], says="launch.py -m"),
            groups: measure(folder, [*LAUNCH, *GROUPS, "launch.mode=dry"], says=r"96 cells: 96 to start"),
            dry: measure(
                folder, [*LAUNCH, *CELLS, "launch.mode=dry"], says=r"seed=23.*parallelism=pp|parallelism=pp.*seed=23"
            ),
            submission: measure_submission(folder, args.slurm_cluster)
            if shutil.which("slurmctld", path=path())
            else None,
            status: measure(folder, [*TITAN, "status", str(folder / "runs500")], says=r"300 done"),
        }
    print(
        f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n{'':<34}{'limit, s':>9}{'took, s':>9}{'CPU, s':>9}"
    )
    for what, result in found.items():
        numbers = f"{result[0]:>9.1f}{result[1]:>9.1f}" if result else "   no SLURM here"
        print(
            f"{what:<34}{LIMITS[what]:>9.1f}{numbers}{'   OVER ITS LIMIT' if result and result[0] > LIMITS[what] else ''}"
        )
    return int(any(result and result[0] > LIMITS[what] for what, result in found.items()))


def measure(folder: Path, command: list[str], says: str, **environment: str) -> tuple[float, float]:
    """Return the wall-clock and CPU seconds of a command. Raise SystemExit if it fails, prints something unexpected, or
    imports torch.
    """
    cpu, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    took, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    errors = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    if done.returncode or not re.search(says, done.stdout):
        raise SystemExit(f"{' '.join(command)}: status {done.returncode}\n{done.stdout[-2000:]}\n{errors}")
    if re.search(r"\| +torch$", done.stderr, re.M):
        raise SystemExit(f"{' '.join(command)}: has imported torch")
    return took, after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime


def measure_submission(folder: Path, script: Path) -> tuple[float, float]:
    """Return the wall-clock and CPU seconds of submitting 96 cells to SLURM; the jobs may not begin before tomorrow."""
    with tempfile.TemporaryDirectory(prefix="o-", dir="/tmp") as home:  # a short path, as it contains unix sockets
        environment = {
            "SLURM_HOME": home,
            "SLURM_CONF": f"{home}/etc/slurm.conf",
            "SLURM_OWNER": str(os.getpid()),
            "PATH": path(home),
        }
        slurm = {**os.environ, **environment}
        subprocess.run([str(script), "up", "4", "4"], env=slurm, check=True, capture_output=True)
        try:
            result = measure(
                folder,
                [*LAUNCH, *CELLS, "cluster=slurm", "cluster.gpus_per_node=4", "+cluster.sbatch.begin=now+1day"],
                says="96 queued",
                **environment,
            )
            subprocess.run(["scancel", "--me"], env=slurm, check=True)
            return result
        finally:
            subprocess.run([str(script), "down"], env=slurm, check=True, capture_output=True)


def path(home: str = "") -> str:
    """Return PATH with SLURM's daemons, and with the programs of the temporary SLURM."""
    return f"{f'{home}/bin:' if home else ''}{os.environ['PATH']}:/usr/sbin:/sbin"


def make_runs(runs: Path, number: int) -> None:
    """Make run directories like those of real trainings: of every five, three are done, one has failed and one was
    interrupted.
    """
    job = compose_job("debug=tiny", f"paths.runs={runs}")
    for seed in range(number):
        job.seed = seed
        cell = freeze(job)
        overrides = ["debug=tiny", f"seed={seed}"]
        attempt = rundir.claim(directory := rundir.directory_of(cell), 1, cell, overrides)
        rundir.end_attempt(attempt)
        write_text(
            directory / "metrics.jsonl",
            "".join(
                f'{{"step": {step}, "loss": {9 - step / 10}, "tokens_per_second": 4000.0}}\n' for step in range(1, 6)
            ),
            durable=False,
        )
        status, error = Exit.DONE, None
        if seed % 5 < 3:
            write_json(
                directory / "result.json",
                {"status": "done", "steps": 5, "final_loss": 8.5, "tokens_per_second": 4000.0},
            )
        elif seed % 5 == 3:
            status, error = describe(ValueError("a bug"))
        else:
            status, error = describe(Stopped("stopped after step 5 of 5"))
        write_json(
            attempt / "rank_0.json",
            {"host": "node0", "started": 0.0, "ended": 60.0, "exit_status": int(status), "error": error},
        )


if __name__ == "__main__":
    sys.exit(main())
