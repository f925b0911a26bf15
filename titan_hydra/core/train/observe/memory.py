"""Report what used a device's memory when it ran out: the peak, and the lines of code that allocated it."""

import collections

import torch

from titan_hydra.core.base.private import memory_snapshot, record_memory_history
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import Run

SHOWN = 20  # number of stacks in memory_<rank>.txt, which has the stacks with the most bytes


def facts() -> dict[str, float]:
    """Return the peak of reserved memory and the capacity of this rank's device, in GiB; {} on a CPU."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    peak = torch.cuda.memory_stats().get("reserved_bytes.all.peak", 0)
    return {"peak_gib": peak / 2**30, "capacity_gib": torch.cuda.get_device_properties().total_memory / 2**30}


def record(on: bool) -> None:
    """Start or stop torch's recording of the stack of each allocation. Recording costs time, so it is on only during
    the first step; most jobs that do not fit into memory fail there.
    """
    if torch.cuda.is_available():
        record_memory_history(enabled="state" if on else None, stacks="python")


def explain_out_of_memory(run: Run, error: BaseException) -> None:
    """Write memory_<rank>.txt if `error` reports that device memory ran out: the bytes allocated by each stack, and
    torch's summary.
    """
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    if error is None or not torch.cuda.is_available():
        return
    held: collections.Counter[str] = collections.Counter()
    for segment in memory_snapshot()["segments"]:
        for block in segment["blocks"]:
            if block["state"] == "active_allocated":
                frames = block.get("frames") or [
                    {"filename": "not recorded after the first step", "line": 0, "name": ""}
                ]
                held["\n".join(f"    {frame['filename']}:{frame['line']} {frame['name']}" for frame in frames[:8])] += (
                    block["size"]
                )
    top = [f"{size / 2**30:.3f} GiB\n{stack}" for stack, size in held.most_common(SHOWN)]
    layout.MEMORY.of(run.attempt, run.rank).write_text(
        "\n".join([str(error), "", *top, "", torch.cuda.memory_summary()])
    )
