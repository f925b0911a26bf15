"""Measure how long training waits for a save: python benchmarks/checkpoints.py [--mib 600] [--ranks 2] [--saves 5]
[--folder DIR]

One model, trained by AdamW with FSDP over the ranks, is saved in three ways in turn: with checkpoint=sync; with
checkpoint=async, while training steps run until the checkpoint is written; and with checkpoint=async while no step runs
beside the copy (async, bare). `held` is how long training waits: for the start of the save and, before the update, for
the end of the copy. The first save of each kind creates buffers; it is shown but not counted.
"""

import argparse
import multiprocessing
import os
import shutil
import tempfile
from pathlib import Path
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from titan_hydra.core.checkpoint.checkpointer import Checkpointer
from titan_hydra.core.job.config.operation import Checkpoint
from titan_hydra.core.job.run.run import Run

WIDTH = 2048
KINDS = ("sync", "async", "async, bare")  # bare: no step runs beside the copy, so training waits for all of it


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=600, help="size of a checkpoint: weights and two moments")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--saves", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; default: the temporary folder")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        processes = [
            multiprocessing.Process(target=measure, args=(rank, args, Path(folder))) for rank in range(args.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    raise SystemExit(max(process.exitcode for process in processes))


def measure(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """Run one rank: save in each of the three ways in turn, and on rank 0 print the time of each save."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.ranks)
    layers = max(1, args.mib * 2**20 // (WIDTH * WIDTH * 4 * 3))
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    run = Run(folder, folder, rank, rank, args.ranks)
    savers = {
        name: Checkpointer(Checkpoint(name=name, keep_latest_k=1), run, model, [optimizer])
        for name in ("sync", "async")
    }
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    train(model)
    optimizer.step()
    for step in range(3 * (args.saves + 1)):
        kind = KINDS[step % 3]
        saver = savers[kind.partition(",")[0]]
        saver.report = lambda event, step, seconds, seconds_held, kind=kind: times[kind].append((seconds_held, seconds))
        saver.save(step + 1, {})
        if kind == KINDS[2]:
            saver.wait_for_staging()
        going = saver.pending
        # make steps until every rank has written, so that the disk is idle at the next save
        while saver.pending is not None:
            train(model)
            saver.wait_for_staging()
            optimizer.step()
            flag = torch.tensor(int(going.written.done()))
            dist.all_reduce(flag, dist.ReduceOp.MIN)
            if flag:
                saver.finish_pending()
        saver.bin.wait()
        os.sync()
    if rank == 0:
        newest = max((folder / "checkpoints").iterdir())
        size = sum(file.stat().st_size for file in newest.iterdir())
        show(times, size, args.ranks)
    dist.barrier()
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    dist.destroy_process_group()


def train(model: nn.Module) -> None:
    """Run a forward and a backward, with which a copy can overlap."""
    model(torch.randn(64, WIDTH)).square().mean().backward()


def show(times: dict[str, list[tuple[float, float]]], size: int, ranks: int) -> None:
    """Print a line for each save, medians, and the ratio."""
    print(f"{size / 2**20:,.0f} MiB by {ranks} ranks; seconds that training is held, and until the step is complete")
    for name, rows in times.items():
        first, *others = (f"{held:.3f} of {seconds:.3f}" for held, seconds in rows)
        print(f"{name:<18} first {first}   then {', '.join(others)}")
    sync, *others = (median(held for held, _ in times[kind][1:]) for kind in KINDS)
    for kind, held in zip(KINDS[1:], others, strict=True):
        print(f"held: sync {sync:.3f} s, {kind} {held:.3f} s: 1/{sync / held:.1f}")


if __name__ == "__main__":
    main()
