"""Describe what a measurement is made on: python benchmarks/gpu/card.py [cuda|cpu] prints the device, its limits, the
versions, and the environment that its processes need, as JSON.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
ALLOCATOR = "PYTORCH_ALLOC_CONF"
sys.path.insert(0, str(ROOT))  # a carried tree is not installed


def main(device: str, *tried: str) -> None:
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} if device == "cpu" else {}
    if device == "cuda" and not tried:
        environment = {ALLOCATOR: "expandable_segments:True"}
    os.environ.update(environment)
    import torch

    from titan_hydra.core.job.run.code import versions
    from titan_hydra.core.train.observe.metrics import device_name, peak_flops

    where = torch.device(device)
    found = {
        "device": device_name(where),
        "cores": len(os.sched_getaffinity(0)),
        **versions(),
        "torch": torch.__version__,
        "commit": commit(),
        "environment": environment,
    }
    if device == "cuda":
        try:
            torch.empty(2**20, device=where)
        except RuntimeError:
            if tried or not torch.cuda.is_available():
                raise
            del os.environ[ALLOCATOR]  # in some virtual machines the driver does not support it
            os.execv(sys.executable, [sys.executable, __file__, device, "again"])
        found |= {
            "memory_gib": torch.cuda.get_device_properties().total_memory / 2**30,
            "peak_flops": peak_flops(where),
            "capability": torch.cuda.get_device_capability(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
            "smi": smi(),
        }
    print(json.dumps(found | {"host": platform.platform()}))


def commit() -> str | None:
    """Return the commit of this tree, from the file that `carry` wrote or from git."""
    if (noted := ROOT / "COMMIT").exists():
        return noted.read_text().strip()
    try:
        return (
            subprocess.run(
                ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
            ).stdout.strip()
            or None
        )
    except OSError:
        return None


def smi() -> str:
    """Return name, driver, power limit and clocks, as nvidia-smi prints them."""
    query = "name,driver_version,power.limit,clocks.max.sm,clocks.max.mem,memory.total"
    try:
        return subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True, text=True, timeout=30
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)


if __name__ == "__main__":
    main(*sys.argv[1:] or ["cuda"])
