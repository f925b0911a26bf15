"""Describe what a measurement was made on: python benchmarks/gpu/card.py [cuda|cpu] prints the device, its limits and
the versions as JSON.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # a carried tree is not installed


def main(device: str) -> None:
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch

    from titan_hydra.base.versions import versions
    from titan_hydra.observe.metrics import device_name, peak_flops

    where = torch.device(device)
    found = {
        "device": device_name(where),
        "cores": len(os.sched_getaffinity(0)),
        **versions(),
        "torch": torch.__version__,
        "commit": commit(),
    }
    if device == "cuda":
        torch.empty(2**20, device=where)  # this fails if the environment's allocator settings do not suit the card
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
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
