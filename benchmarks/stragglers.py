"""Count the runs in which a slow rank is named: python benchmarks/stragglers.py [--quiet 10] [--slow 2] [--by 0.3]

Small runs on CPUs, one after another: in some of them nothing is slow, in the others rank 1 computes longer by a
fraction of its own time, with multiplications. The exit status is 1 if a rank of a quiet run is named, or rank 1 of a
slowed run is not. Run it on a machine that is as busy as yours: what is measured is CPU time.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.stragglers import slow_rank

ROOT = Path(__file__).parents[1]
RECORD = """
from titan_hydra.core.job.config.registry import ObjectiveKind, register
register(ObjectiveKind("slowed", "slowed_on_ranks:Slowed"))
"""
OBJECTIVE = """
import time
import torch
import torch.distributed as dist
from titan_hydra.core.train.objectives.language import Language

class Slowed(Language):
    last = None
    def loss(self, output, batch):
        now = time.thread_time()
        until = now + {by} * (now - (self.last or now))
        while dist.get_rank() == 1 and time.thread_time() < until:
            torch.ones(64, 64) @ torch.ones(64, 64)
        self.last = time.thread_time()
        return super().loss(output, batch)
"""
WORDS = (
    "debug=tiny",
    "precision=fp32",
    "parallelism=fsdp",
    "checkpoint=off",
    "cluster.max_parallel=1",
    "metrics.log_every=2",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quiet", type=int, default=10)
    parser.add_argument("--slow", type=int, default=2)
    parser.add_argument("--by", type=float, default=0.3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=42)
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="stragglers-") as name:
        folder = Path(name)
        (folder / "slowed.py").write_text(RECORD)
        (folder / "slowed_on_ranks.py").write_text(OBJECTIVE.format(by=args.by))
        for kind, runs, more in (
            ("quiet", args.quiet, ()),
            ("slow", args.slow, ("train.imports=[slowed]", "objective.name=slowed")),
        ):
            for directory in train(folder, kind, runs, (f"gpus={args.ranks}", f"steps={args.steps}", *more)):
                rows = layout.METRICS.rows(directory)[0]
                found = slow_rank(rows)
                wrong += (found.rank if found else None) != (None if kind == "quiet" else 1)
                ratios = [row["slowest_over_median"] for row in rows if row["slowest_over_median"]]
                print(
                    f"{kind:<6} {len(rows):>3} rows  slowest over median {min(ratios):.3f} to {max(ratios):.3f}, median "
                    f"{median(ratios):.3f}  {found or 'no rank is named'}",
                    flush=True,
                )
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; wrong: {wrong} of {args.quiet + args.slow}")
    return int(wrong > 0)


def train(folder: Path, kind: str, runs: int, words: tuple[str, ...]) -> list[Path]:
    """Train `runs` runs with different seeds, and return their directories."""
    if not runs:
        return []
    seeds = f"seed={','.join(map(str, range(runs)))}"
    line = [sys.executable, str(ROOT / "launch.py"), "-m", *WORDS, *words, seeds, f"name={kind}"]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run(line, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    return sorted((folder / "runs").glob(f"{kind}-*"))


if __name__ == "__main__":
    sys.exit(main())
