"""Measure what a large sweep costs the login node and SLURM: python benchmarks/submission.py [--nodes 64] [--seeds 200]

Cells of five shapes, from 2 nodes to all nodes of a SLURM cluster on this machine (tests/slurm/slurm-cluster; needs
root), are submitted on hold, submitted again, listed and cancelled. For each command, this measures the CPU seconds of
its process and of the SLURM commands that it calls, its largest resident memory, and how often it calls each SLURM
command. Wall-clock times are left out, as they depend on the load of the machine.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
CALLS = ("sbatch", "squeue", "scontrol", "sacct", "sacctmgr", "scancel")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=200)
    args = parser.parse_args()
    gpus = ",".join(str(8 * nodes) for nodes in (2, 4, 8, args.nodes // 2, args.nodes))
    line = [
        "launch.py",
        "-m",
        "debug=tiny",
        "parallelism=fsdp",
        f"gpus={gpus}",
        f"seed=range({args.seeds})",
        "sweep.name=large",
        "steps=10",
        f"data.global_batch={8 * args.nodes}",
        "data.local_batch=1",
        "cluster=slurm",
        "cluster.gpus_per_node=8",
        "cluster.time_minutes=60",
        "+cluster.sbatch={hold: true}",
    ]
    titan = [
        ["-m", "titan_hydra.cli", *words]
        for words in (["status"], ["status", "--json"], ["status", "--all"], ["resume"], ["stop", "-y"])
    ]
    script = ROOT / "tests" / "slurm" / "slurm-cluster"
    with (
        tempfile.TemporaryDirectory(prefix="s-", dir="/tmp") as home,
        tempfile.TemporaryDirectory(prefix="sub-") as name,
    ):
        folder = Path(name)
        slurm = {
            **os.environ,
            "SLURM_HOME": home,
            "SLURM_CONF": f"{home}/etc/slurm.conf",
            "SLURM_OWNER": str(os.getpid()),
            "PATH": f"{home}/bin:{os.environ['PATH']}:/usr/sbin:/sbin",
        }
        subprocess.run([str(script), "up", str(args.nodes), "8"], env=slurm, check=True, capture_output=True)
        try:
            environment = slurm | {
                "PATH": f"{counting(folder / 'bin', slurm['PATH'])}:{slurm['PATH']}",
                "PYTHONPATH": str(ROOT),
            }
            print(
                f"{5 * args.seeds} cells, {args.nodes} nodes x 8 GPUs; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n"
                f"{'':<28}{'CPU, s':>8}{'MB':>6}  calls of SLURM"
            )
            for command in ([str(ROOT / line[0]), *line[1:]], [str(ROOT / line[0]), *line[1:]], *titan):
                seconds, memory, calls = measure(folder, command, environment)
                shown = " ".join(command[2:]) if command[0] == "-m" else "launch.py, the whole line"
                print(
                    f"{shown:<28}{seconds:>8.1f}{memory / 1e6:>6.0f}  {', '.join(f'{count} {call}' for call, count in calls.items())}",
                    flush=True,
                )
        finally:
            subprocess.run([str(script), "down"], env=slurm, check=True, capture_output=True)
    return 0


def counting(folder: Path, path: str) -> Path:
    """Write a folder of programs that record each call in `folder`/calls and then run SLURM's own program."""
    folder.mkdir()
    for name in CALLS:
        own = subprocess.run(["which", name], env={"PATH": path}, capture_output=True, text=True).stdout.strip()
        if own:
            (folder / name).write_text(f'#!/bin/sh\necho {name} >>{folder}/calls\nexec {own} "$@"\n')
            (folder / name).chmod(0o755)
    return folder


def measure(folder: Path, command: list[str], environment: dict[str, str]) -> tuple[float, float, Counter]:
    """Return CPU seconds, bytes of memory and SLURM calls of a Python command. Raise SystemExit if it fails."""
    calls = folder / "bin" / "calls"
    calls.write_text("")
    with (folder / "output").open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)}: status {status}\n{(folder / 'output').read_text()[-2000:]}")
    return usage.ru_utime + usage.ru_stime, 1024 * usage.ru_maxrss, Counter(calls.read_text().split())


if __name__ == "__main__":
    sys.exit(main())
