"""Run cases in sets of processes that many cases share, so that torch is imported only a few times. This file imports
no torch.

A case that raises, dies or hangs ends its set. Its row has the error, and the next cases run in a new set.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_cases import Case

from titan_hydra.config.files import read_json

HERE = Path(__file__).parent
PER_SET = 12  # cases that share one set of processes: each leaves process groups with the memory of their NCCL buffers
SLOWER = 5  # a case may take this many times as long on a CPU
START = 180  # seconds within which the first case of a set must begin
# Several ranks share one GPU: NCCL treats each rank as a host of its own, and symmetric memory allows it. For tests
# only.
ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_BUFFSIZE": str(2**20),
    "NCCL_MAX_NCHANNELS": "4",
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass
class Row:
    """The result of a case: passed, failed (it raised), crashed, hung, skipped, or not run because time was up."""

    name: str
    ranks: int
    status: str
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def rows(
    cases: list[Case], folder: Path, gpu: bool, dry: bool, seconds: float, environment: dict[str, str] | None = None
) -> Iterator[Row]:
    """Run cases in their order and yield rows as they end; after `seconds` no case begins. Adjacent cases with the same
    number of ranks share processes, unless they run apart. References, with which layouts are compared, run before the
    first of these layouts.
    """
    until = time.monotonic() + seconds
    for case in cases:
        if case.gpu and not gpu:
            yield Row(case.name, case.ranks, "skipped", error=case.gpu)
    able = [case for case in cases if gpu or not case.gpu]
    bases = {
        (layout.base, layout.uneven_mask, layout.documents): case
        for case in able
        if (layout := case.options.get("layout"))
    }
    sets = [
        (*kind, [case.name for case in some])
        for kind, some in itertools.groupby(able, lambda case: (case.ranks, case.world, case.apart))
    ]
    first = next((number for number, (_, world, *_) in enumerate(sets) if world), 0)
    sets.insert(first, (1, True, False, [f"reference of {case.name}" for case in bases.values()]))
    limits = {case.name: case.seconds * (1 if gpu else SLOWER) for case in cases}
    for ranks, world, apart, names in sets:
        size = 1 if apart else PER_SET if world else max(len(names), 1)
        waiting = [names[first : first + size] for first in range(0, len(names), size)]
        while waiting:
            some = waiting.pop(0)
            if some and time.monotonic() > until:
                # time is up: report every remaining case as not run, and compute no references
                yield from (Row(name, ranks, "not run", error="time was up") for name in some if name in limits)
                continue
            processes = Processes(folder, ranks, world, some, gpu, dry, environment or dict(os.environ))
            count = 0
            for row in processes.run(limits, until):
                count += 1
                if row.name in limits or row.status != "passed":  # a reference has a row only if it failed
                    yield row
            if count < len(some):
                waiting.insert(0, some[count:])


class Processes:
    """One set: a process for each rank, and the cases that they run in order, up to the first case that does not pass."""

    def __init__(
        self, folder: Path, ranks: int, world: bool, names: list[str], gpu: bool, dry: bool, environment: dict[str, str]
    ) -> None:
        self.folder = folder / f"set_{len(list(folder.glob('set_*')))}"
        self.folder.mkdir(parents=True)
        self.ranks, self.names = ranks, names
        plan = {"cases": names, "ranks": ranks, "world": world, "gpu": gpu, "dry": dry, "shared": str(folder)}
        (self.folder / "plan.json").write_text(json.dumps(plan))
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        self.environment = environment | ONE_GPU | caches | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
        self.processes = [self.start(rank) for rank in range(ranks if names else 0)]

    def start(self, rank: int) -> subprocess.Popen:
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": str(self.ranks),
            "NCCL_HOSTID": f"host{rank}",
        }
        with (self.folder / f"rank_{rank}.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, str(HERE / "gpu_rank.py"), str(self.folder), str(rank)],
                stdout=log,
                stderr=log,
                stdin=subprocess.PIPE,
                env=self.environment | place,
                start_new_session=True,
            )

    def run(self, limits: dict[str, int], until: float) -> Iterator[Row]:
        """Return the rows of the cases that ended; the last one may not have passed. If so, its ranks' logs are in
        logs.txt.
        """
        number, begun, since = 0, False, time.monotonic()
        try:
            while number < len(self.names):
                name = self.names[number]
                if (done := read_json(self.folder / f"done_{number}.json")) is not None:
                    yield Row(name, self.ranks, "passed", round(done["seconds"], 1), done["facts"])
                    number, begun, since = number + 1, False, time.monotonic()
                    continue
                if not begun and (read_json(self.folder / "begun.json") or {}).get("number") == number:
                    begun, since = True, time.monotonic()
                took = time.monotonic() - since
                failed = any(process.poll() for process in self.processes)
                if failed or took > (limits.get(name, 90) if begun else START) or time.monotonic() > until + 30:
                    row = self.ended(name, took) if failed else self.hung(name, took)
                    self.keep_logs(name)
                    yield row
                    return
                time.sleep(0.05)
        finally:
            self.kill()

    def ended(self, name: str, took: float) -> Row:
        """Return the row of a case in which a process has ended."""
        time.sleep(1)  # other ranks may be about to write their error
        killed = [(rank, -process.poll()) for rank, process in enumerate(self.processes) if (process.poll() or 0) < 0]
        errors = sorted(self.folder.glob("error_*.txt"), key=lambda file: file.stat().st_mtime)
        if errors and not killed:  # the first error counts, because it caused the errors of the other ranks
            return Row(name, self.ranks, "failed", round(took, 1), error=errors[0].read_text().strip()[-3000:])
        words = [f"rank {rank} was killed by signal {number}\n{self.tail(rank)}" for rank, number in killed]
        return Row(name, self.ranks, "crashed", round(took, 1), error="\n".join(words) or self.tail(0))

    def hung(self, name: str, took: float) -> Row:
        """Return the row of a case that did not end in time, with the stacks of its ranks."""
        for process in self.processes:
            process.send_signal(signal.SIGABRT)
        time.sleep(1)
        return Row(
            name, self.ranks, "hung", round(took, 1), error="\n".join(self.tail(rank) for rank in range(self.ranks))
        )

    def tail(self, rank: int) -> str:
        return f"--- rank {rank}\n" + (self.folder / f"rank_{rank}.log").read_text(errors="replace")[-2000:]

    def keep_logs(self, name: str) -> None:
        """Append the ends of all ranks' logs to a file that all sets share."""
        with (self.folder.parent / "logs.txt").open("a") as file:
            for rank in range(self.ranks):
                file.write(
                    f"=== {name}, rank {rank}\n"
                    + (self.folder / f"rank_{rank}.log").read_text(errors="replace")[-20_000:]
                )

    def kill(self) -> None:
        """Kill the processes of the set, and those that its checks have started."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
