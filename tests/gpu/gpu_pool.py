"""Run cases in sets of processes that many cases share, so that torch is imported only a few times. This file imports
no torch.

A case that raises, dies or hangs ends its set. Its row has the error, and the next cases run in a new set.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpu_cases import Case, base_of

from titan_hydra.core.job.config.files import read_json

HERE = Path(__file__).parent
PER_SET = 12  # cases that share one set of processes: each leaves process groups with the memory of their NCCL buffers
SLOWER = 5  # a case may take this many times as long on a CPU
START = 120  # seconds within which the first case of a set must begin
GRACE = 30  # seconds after the end of the time, in which a case may end
EQUAL = 3  # after as many equal errors in a row, sets of this kind start no more
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
    cases: list[Case],
    folder: Path,
    gpu: bool,
    dry: bool,
    seconds: float,
    environment: dict[str, str] | None = None,
    beside: bool = False,
) -> Iterator[Row]:
    """Run cases in their order and yield rows as they end; after `seconds` no case begins. Adjacent cases with the same
    number of ranks share processes, unless they run apart. References, with which layouts are compared, run before the
    layouts of a set. With `beside`, other processes use the device too.
    """
    until = time.monotonic() + seconds
    for case in cases:
        if case.gpu and not gpu:
            yield Row(case.name, case.ranks, "skipped", error=case.gpu)
    able = [case for case in cases if gpu or not case.gpu]
    limits = {case.name: case.seconds * (1 if gpu else SLOWER) for case in cases}
    errors = Errors()
    for ranks, world, names in sets(able):
        kind = (ranks, world)
        while names:
            reason = errors.reason(kind) or ("time was up" if time.monotonic() > until else "")
            if reason:  # report every remaining case as not run, and compute no references
                yield from (Row(name, ranks, "not run", error=reason) for name in names if name in limits)
                break
            processes = Processes(folder, ranks, world, names, gpu, dry, environment or dict(os.environ), beside)
            count = 0
            for row in processes.run(limits, until):
                count += 1
                errors.note(kind, row)
                if row.name in limits or row.status != "passed":  # a reference has a row only if it failed
                    yield row
            names = names[count:]


def sets(cases: list[Case]) -> Iterator[tuple[int, bool, list[str]]]:
    """Yield the sets of processes that run the cases: their ranks, whether these join a process group, and the names of
    what they run. The references that a set is the first to need are a set before it.
    """
    known: set[tuple] = set()
    for (ranks, world, apart), group in itertools.groupby(cases, lambda case: (case.ranks, case.world, case.apart)):
        shared = list(group)
        size = 1 if apart else PER_SET if world else len(shared)
        for first in range(0, len(shared), size):
            some = shared[first : first + size]
            layouts = {case.name: case.options["layout"] for case in some if "layout" in case.options}
            bases = {base_of(one): name for name, one in reversed(layouts.items())}
            if missing := [f"reference of {name}" for base, name in bases.items() if base not in known]:
                yield 1, True, missing[::-1]
            known |= bases.keys()
            yield ranks, world, [case.name for case in some]


class Errors:
    """The errors with which the last cases of each kind of set ended. If they are equal, the kind itself is at fault, as
    when NCCL does not start, and each further case would cost the start of a set.
    """

    def __init__(self) -> None:
        self.last: dict[tuple[int, bool], list[str]] = {}

    def note(self, kind: tuple[int, bool], row: Row) -> None:
        """Keep the last line of the error of a row; a case that passes forgets those before it."""
        lines = row.error.strip().splitlines() or [row.status]
        end = "hung" if row.status == "hung" else re.sub(r"\S*/set_\d+\S*|0x[0-9a-f]+", "...", lines[-1])
        self.last[kind] = [] if row.status == "passed" else [*self.last.get(kind, []), end][-EQUAL:]

    def reason(self, kind: tuple[int, bool]) -> str:
        """Return why no further set of this kind starts, or ""."""
        last = self.last.get(kind, [])
        return f"{EQUAL} cases in a row ended with: {last[0]}" if len(last) == EQUAL and len({*last}) == 1 else ""


class Processes:
    """One set: a process for each rank, and the cases that they run in order, up to the first case that does not pass."""

    def __init__(
        self,
        folder: Path,
        ranks: int,
        world: bool,
        names: list[str],
        gpu: bool,
        dry: bool,
        environment: dict[str, str],
        beside: bool,
    ) -> None:
        self.folder = folder / f"set_{len(list(folder.glob('set_*')))}"
        self.folder.mkdir(parents=True)
        self.ranks, self.names = ranks, names
        plan = {"cases": names, "ranks": ranks, "world": world, "gpu": gpu, "dry": dry, "beside": beside}
        plan["shared"] = str(folder)
        (self.folder / "plan.json").write_text(json.dumps(plan))
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
        self.environment = environment | ONE_GPU | caches | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
        self.patience = START * (1 if gpu else SLOWER)
        self.processes = [self.start(rank) for rank in range(ranks)]

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
                overdue = took > (limits.get(name, 90) if begun else self.patience)
                if failed or overdue:
                    row = self.ended(name, took) if failed else self.hung(name, took)
                    self.keep_logs(name)
                    yield row
                    return
                if time.monotonic() > until + GRACE:
                    yield Row(name, self.ranks, "not run", round(took, 1), error="time was up while it ran")
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
