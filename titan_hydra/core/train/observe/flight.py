"""The flight recorder of a rank. It writes the rank's position, and the last collectives from torch's own recorders,
into a file that `titan logs --hang` reads.

torch has one recorder for gloo and one for NCCL. gloo's recorder omits sends and receives between pipeline stages, so
the functions in this file record them. Sends and receives over NCCL are not recorded, as a record would keep their
tensors in the device's memory.
"""

import collections
import json
import os
import pickle
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

import torch.distributed as dist

from titan_hydra.core.base.private import flight_recorders, process_groups, wrap_stage_messages
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.parallel.mesh import Mesh

RECORDED = 2000  # number of collectives that torch's recorder keeps
WRITTEN = 400  # maximum number of collectives in a dump, and of messages (sends and receives); the newest are kept
RECORDERS = flight_recorders()
FRAMES = 3  # number of innermost frames of a collective's stack in a dump, and of further frames outside torch
# the records of sends and receives over gloo, the newest last
MESSAGES: collections.deque[dict[str, Any]] = collections.deque(maxlen=WRITTEN)
# for each other rank, the numbers of sends to it and of receives from it
_counts: collections.Counter[tuple[str, int]] = collections.Counter()
_lock = threading.Lock()
_set: dict[str, str] = {}  # the variables that `configure` has set, with their values


def configure(run: Run) -> None:
    """Set the variables that enable torch's recorder, unless the user has set them. Call this before creating a process
    group, which reads them.
    """
    settings = {"TORCH_FR_BUFFER_SIZE": str(RECORDED), "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
    settings["TORCH_NCCL_ENABLE_TIMING"] = (
        "1"  # needed by core/train/observe/stragglers.py, which reads how long collectives took
    )
    # both variables set the path of NCCL's own dump: the first in new, the second in older releases of torch
    for name in (
        "TORCH_FR_DUMP_TEMP_FILE",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
    ):
        # torch appends the rank to this path; torch's tool torchfrtrace reads the file
        settings[name] = str(run.attempt / "nccl_trace_")
    for name, value in settings.items():
        if os.environ.get(name) == _set.get(name):  # not set, or set for an earlier run of this process
            os.environ[name] = _set[name] = value


def record_messages() -> None:
    """Start to record the sends and receives of pipeline stages over gloo, which torch's recorder omits. Repeated calls
    are harmless.
    """

    def counted(batch_p2p: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap torch's exchange of messages, so that each of them is numbered and recorded for the flight recorder's
        dump.
        """

        def exchange(operations: list[dist.P2POp], desc: str | None = None) -> list[dist.Work]:
            """Send and receive as torch does, and record each message with its number between the two ranks."""
            works = batch_p2p(operations, desc)
            for operation, work in zip(operations, works, strict=False):
                kind, peer = operation.op.__name__, operation.peer
                _counts[kind, peer] += 1
                message = {
                    "op": kind.removeprefix("i"),
                    "peer": peer,
                    "seq": _counts[kind, peer],
                    "work": work,
                    "time": time.time(),
                }
                MESSAGES.append(message | {"size": list(operation.tensor.shape), "group": operation.group.group_name})
            # handles of completed messages are dropped, so that their tensors are freed
            for message in list(MESSAGES)[-64:-16]:
                if message["work"] is not None and message["work"].is_completed():
                    message["work"] = None
            return works

        return exchange

    wrap_stage_messages(counted)


def progress() -> tuple:
    """Return a value that changes whenever a collective, a send or a receive begins or ends. A call takes microseconds."""
    # loading these pickles is safe, as torch has just made them in this process
    states = [pickle.loads(dump(False, False, False)) for dump in RECORDERS]
    return str([state.get("pg_status") for state in states]), sum(_counts.values())


def dump(run: Run, where: dict[str, Any], mesh: Mesh | None, why: str, error: BaseException | None = None) -> None:
    """Write flight_<rank>.json: this rank's position, the stacks of its threads, its process groups, and its last
    operations in these groups.

    `where` is the position: the step, the phase, and when recent steps began.
    """
    with _lock:
        content = {
            "rank": run.rank,
            "host": socket.gethostname(),
            "time": time.time(),
            "why": why,
            **where,
            "groups": groups_of_rank(mesh),
            "collectives": collectives(),
            "messages": [
                {**message, "work": None, "done": message["work"] is None or message["work"].is_completed()}
                for message in list(MESSAGES)
            ],
            "stacks": stacks_of_threads(error),
        }
        write_text(layout.FLIGHT.of(run.attempt, run.rank), json.dumps(content), durable=False)


def groups_of_rank(mesh: Mesh | None) -> dict[str, dict]:
    """Return this rank's process groups by name, each with its mesh dimension and its ranks. (The group of a dimension
    that spans all ranks is the default group.)
    """
    groups = {
        group.group_name: {
            "mesh": group.group_desc.removeprefix("mesh_"),
            "ranks": sorted(process_groups.pg_group_ranks[group]),
        }
        for group in list(process_groups.pg_map)
    }
    for name in mesh.world.mesh_dim_names if mesh is not None and mesh.world is not None else ():
        group = mesh.world.get_group(name)
        if group.size() > 1:
            groups[group.group_name]["mesh"] = name
    return groups


def collectives() -> list[dict]:
    """Return the last collectives of torch's recorders, oldest first."""
    entries = [
        entry
        for dump in RECORDERS
        for entry in pickle.loads(dump(True, True, False)).get("entries", [])
        # NCCL sends and receives are left out: each rank numbers them by itself, so the numbers of two ranks cannot be
        # compared.
        if not entry["is_p2p"]
    ]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    return [
        {
            "group": entry["process_group"][0],
            "backend": entry["profiling_name"].partition(":")[0],
            "seq": entry["collective_seq_id"],
            "op": entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
            "sizes": entry["input_sizes"],
            # An NCCL collective counts as done when it is complete, but a gloo collective when the rank has waited for
            # its result.
            "done": entry["state"] == "completed" or bool(entry["retired"]),
            "time": entry["time_created_ns"] / 1e9,
            "stack": callers(entry.get("frames", [])),
        }
        for entry in entries[-WRITTEN:]
    ]


def callers(frames: list[dict]) -> list[str]:
    """Return the FRAMES innermost frames of a stack. Of the remaining frames, also return the FRAMES innermost that are
    not in torch.
    """
    shown = frames[:FRAMES] + [frame for frame in frames[FRAMES:] if "/torch/" not in frame["filename"]][:FRAMES]
    return [f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in shown]


def stacks_of_threads(error: BaseException | None) -> dict[str, list[str]]:
    """Return the stack of every Python thread of this process, the innermost call last. If `error` is given, the stack
    of the main thread is the stack that raised the error.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    stacks = {
        names.get(ident, str(ident)): _formatted(traceback.walk_stack(top))[::-1]
        for ident, top in sys._current_frames().items()
    }
    if error is not None:
        stacks["MainThread"] = _formatted(traceback.walk_tb(error.__traceback__))
    return stacks


def _formatted(frames: Iterable[tuple[FrameType, int]]) -> list[str]:
    """Format the frames of a stack, each with its file, line number and function."""
    return [f"{frame.f_code.co_filename}:{line} {frame.f_code.co_name}" for frame, line in frames]
