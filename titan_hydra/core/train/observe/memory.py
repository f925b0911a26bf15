"""Report what used a device's memory when it ran out: the peak, and the lines of code that allocated it."""

import collections
from contextlib import ExitStack
from typing import Any

import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from titan_hydra.core.base.private import memory_snapshot, record_memory_history
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import Run

_RECORDING = ExitStack()  # what holds while torch records
SHOWN = 20  # number of stacks in memory_<rank>.txt, which has the stacks with the most bytes


def facts() -> dict[str, float]:
    """Return the peak of reserved memory and the capacity of this rank's device, in GiB; {} on a CPU."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    peak = torch.cuda.memory_stats().get("reserved_bytes.all.peak", 0)
    return {"peak_gib": peak / 2**30, "capacity_gib": torch.cuda.get_device_properties().total_memory / 2**30}


def record(enabled: str | None, **options: Any) -> None:
    """Start torch's recording of the stack of each allocation ("state" for those that are held, "all" for their
    history), or stop it (None). Recording costs time, so it is on only during the first step, where most jobs fail that
    do not fit into memory, and while a profiler records.

    Meanwhile the recomputation of a checkpoint does not stop early: torch stops it by an exception, which an autograd
    function loses if stacks are recorded (pytorch#179536).
    """
    if not torch.cuda.is_available():
        return
    record_memory_history(enabled=enabled, stacks="python", **options)
    _RECORDING.close()
    if enabled is not None:
        _RECORDING.enter_context(set_checkpoint_early_stop(False))


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
