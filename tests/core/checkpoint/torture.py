"""Kill runs of four ranks (FSDP 2 x TP 2) at the worst moments, fill their disks or damage their files, and then resume
them.

    python tests/core/checkpoint/torture.py            all of them; a line each, and the figures of docs/reliability.md
    python tests/core/checkpoint/torture.py 3 17       some, by number

A kill is a SIGKILL that a rank sends from inside a named function: to itself (one), to every rank (all), or to the
process group with the ranks' parent in it (group). After each fault, the files on disk are checked from outside. Then
the run is resumed: it must start from the newest intact step, and every loss must be bitwise that of an undisturbed
run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import _state_dict_stager

from titan_hydra.core.base.errors import RunError
from titan_hydra.core.checkpoint import safe, writer
from titan_hydra.core.checkpoint.checkpointer import Checkpointer
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train import loop, trainer
from titan_hydra.core.train.worker import own_process
from titan_hydra.experiments.compose.compose import compose_job

# saves are at steps 3, 6, 9, 12; faults occur in the save of step 9 or later
RANKS, STEPS, INTERVAL, FATAL = (
    4,
    12,
    3,
    9,
)
OVERRIDES = (
    "debug=tiny",
    "precision=fp32",
    "parallelism=fsdp_tp",
    "parallelism.tp=2",
    "gpus=4",
    f"steps={STEPS}",
    f"checkpoint.interval={INTERVAL}",
    "checkpoint.keep_latest_k=2",
    "metrics.log_every=1",
    "data.global_batch=4",
    "data.local_batch=2",
)
# name: (object, function, number of this function's call, counted after the save of step 9 has begun)
MOMENTS: dict[str, tuple[object, str, int]] = {
    "staging": (_state_dict_stager.StateDictStager, "_stage_untyped_storage", 20),
    "first write": (writer.SummedFile, "write", 1),
    "late write": (writer.SummedFile, "write", 3),
    "own file": (writer.Writer, "_write_own", 1),
    "index": (writer.Writer, "finish", 1),
    "manifest": (checkpoints, "write_manifest", 1),
    "before rename": (writer.Writer, "commit", 1),
    "after rename": (checkpoints, "sync_folder", 2),  # the first call syncs the step's own folder
    "purge": (checkpoints.Bin, "throw", 1),
    "half purged": (checkpoints, "_delete", 1),
    "next step": (trainer.Trainer, "update", 2),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One run and its fault: a kill at a moment, damage to files, or a full disk."""

    mode: str  # sync or async
    what: str  # the moment of the kill, or the damage
    who: str = "group"  # who is killed: one, all, group; or the file that is damaged
    rank: int = 0

    def __str__(self) -> str:
        return f"{self.mode:5} {self.what:13} {self.who}" + (f" {self.rank}" if self.who == "one" else "")


def cases() -> list[Case]:
    """Return all cases, in the order of their numbers."""
    found = [Case("async", "staging", who, rank) for who, rank in (("one", 0), ("one", 3), ("all", 1), ("group", 2))]
    for mode in ("sync", "async"):
        found += [
            Case(mode, moment, who, rank)
            for moment in ("first write", "late write")
            for who, rank in (("one", 0), ("one", 2), ("all", 1), ("group", 3))
        ]
        found += [Case(mode, "own file", "one", 1)]
        found += [
            Case(mode, moment, who)
            for moment in ("index", "manifest", "before rename", "after rename")
            for who in ("one", "group")
        ]
        found += [Case(mode, "purge", "one"), Case(mode, "half purged", "one"), Case(mode, "half purged", "group")]
        found += [Case(mode, "next step", "one", 2), Case(mode, "next step", "group")]
    found += [
        Case("sync", damage, file)
        for damage in ("truncated", "bit flipped", "removed")
        for file in ("shard", ".metadata", layout.MANIFEST.name, "rank_00001.json")
    ]
    found += [
        Case("sync", "all damaged", "shard"),
        Case("sync", "while resuming", "group"),
        Case("async", "while resuming", "one", 1),
    ]
    found += [Case(mode, what, "disk") for what in ("disk full", "disk full, freed") for mode in ("sync", "async")]
    return found


# --- in the ranks -----------------------------------------------------------------------------------------------------


def sabotage(case: Case, rank: int, kill: Callable[[], None]) -> None:
    """Kill at the moment of the case, from the case's rank, or from rank 0 if only rank 0 reaches this moment."""
    owner, name, call = MOMENTS[case.what]
    only_first = case.what in ("index", "manifest", "before rename", "after rename", "purge", "half purged")
    if rank != (0 if only_first else case.rank):
        return
    calls, begun = [0], [False]
    save, function = Checkpointer.save, getattr(owner, name)

    def noted(self, step, *args):
        begun[0] = step >= FATAL
        return save(self, step, *args)

    def deadly(*args, **kwargs):
        calls[0] += begun[0]
        if calls[0] == call:
            if case.what == "half purged":
                for file in sorted(args[0][0].iterdir())[::2]:
                    file.unlink()
            kill()
            time.sleep(60)
        return function(*args, **kwargs)

    Checkpointer.save = noted
    setattr(owner, name, deadly)


def sabotage_resuming(kill: Callable[[], None]) -> None:
    """Kill while the weights are being read."""
    safe.load_checkpoint = lambda *args, **kwargs: kill()


def fill_disk(ballast: Path, free_again: bool) -> None:
    """Fill the disk at step 4. If the case says so, free space again at step 8, when the save of step 6 has failed
    twice.
    """
    update, count = trainer.Trainer.update, [0]

    def noted(self, *given):
        count[0] += 1
        if count[0] == 4:
            with ballast.open("wb") as file:
                try:
                    while True:
                        file.write(bytes(2**16))
                        file.flush()
                except OSError:
                    if not free_again:  # else no byte is left, not even for rows and logs
                        file.truncate(max(os.fstat(file.fileno()).st_size - 2**17, 0))
        if free_again and count[0] == 8:
            ballast.unlink()
        update(self, *given)

    trainer.Trainer.update = noted


def be_rank(job: Job, directory: Path, attempt: Path, rank: int, before: Callable[[int], None]) -> None:
    """Run one rank of an attempt; this ends the process."""
    status = 1
    try:
        torch.set_num_threads(1)
        own_process(attempt / f"rank_{rank}.log")
        before(rank)
        store = dist.FileStore(str(attempt / "store"), RANKS)
        loop.train(job, Run(directory, attempt, rank, rank, RANKS, store))
        status = 0
    except RunError as error:
        print(error, flush=True)
        status = int(error.status)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


# --- outside ----------------------------------------------------------------------------------------------------------


def attempt(
    job: Job, directory: Path, case: Case | None = None, before: Callable[[int], None] | None = None
) -> list[int]:
    """Run all ranks under a parent process in a process group of their own. Return the exit statuses of the parent and
    of the ranks, as far as known.
    """
    number = 1 + sum(1 for _ in (directory / "attempts").glob("*")) if directory.exists() else 1
    place = directory / "attempts" / str(number)
    place.mkdir(parents=True)
    parent = os.fork()
    if parent == 0:
        os.setpgid(0, 0)
        os._exit(be_parent(job, directory, place, case, before))
    _, status = os.waitpid(parent, 0)
    deadline = time.monotonic() + 300
    while True:  # no rank may outlive a killed parent
        try:
            os.killpg(parent, signal.SIGKILL)
        except ProcessLookupError:
            break
        if time.monotonic() > deadline:
            raise AssertionError("ranks are left")
        time.sleep(0.05)
    statuses = place / "statuses"
    return [os.waitstatus_to_exitcode(status), *(json.loads(statuses.read_text()) if statuses.exists() else [])]


def be_parent(job: Job, directory: Path, place: Path, case: Case | None, before: Callable[[int], None] | None) -> int:
    """Start the ranks. When one of them has died, end the others soon, as the launcher does."""
    (directory / "pids").write_text("")

    def kill() -> None:
        if case.who == "one":
            os.kill(os.getpid(), signal.SIGKILL)
        if case.who == "all":
            for pid in (directory / "pids").read_text().split():
                if int(pid) != os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        os.killpg(0, signal.SIGKILL)

    def prepare(rank: int) -> None:
        if before:
            before(rank)
        elif case and case.what in MOMENTS:
            sabotage(case, rank, kill)
        elif case and rank == case.rank:
            sabotage_resuming(kill)

    ranks = {}
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            be_rank(job, directory, place, rank, prepare)
        ranks[pid] = rank
    (directory / "pids").write_text(" ".join(map(str, ranks)))
    statuses, patience = [None] * RANKS, None
    while ranks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            statuses[ranks.pop(pid)] = os.waitstatus_to_exitcode(status)
            if status and patience is None:
                patience = time.monotonic() + 5
        elif patience and time.monotonic() > patience:
            for pid in ranks:
                os.kill(pid, signal.SIGKILL)
        else:
            time.sleep(0.01)
    (place / "statuses").write_text(json.dumps(statuses))
    return 0 if statuses == [0] * RANKS else 1


def losses(directory: Path) -> dict[int, float]:
    """Return the loss of every step."""
    return {row["step"]: row["loss"] for row in map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())}


def started_from(directory: Path) -> int:
    """Return the step after which the newest attempt continued, from its log."""
    newest = max((directory / "attempts").iterdir(), key=lambda path: int(path.name))
    line = next(line for line in (newest / "rank_0.log").read_text().splitlines() if "; steps " in line)
    return int(line.rpartition("; steps ")[2].split()[0]) - 1


def damage(step: Path, kind: str, name: str) -> None:
    """Truncate a file of a step, flip a bit of it, or remove it."""
    shards = [path.name for path in step.glob("*.distcp") if path.stat().st_size]
    file = step / (random.Random(kind).choice(sorted(shards)) if name == "shard" else name)
    if kind == "removed":
        file.unlink()
    elif kind == "truncated":
        os.truncate(file, file.stat().st_size // 2)
    else:
        content = bytearray(file.read_bytes())
        place = (
            content.index(b'"crc32": "') + 12
            if name == layout.MANIFEST.name
            else random.Random(1).randrange(len(content))
        )
        content[place] ^= 1
        file.write_bytes(content)


def run(case: Case, expected: dict[int, float], scratch: Path) -> dict:
    """Run a case from beginning to end. Raise AssertionError if a promise is broken; return the figures of the case."""
    job = compose_job(*OVERRIDES, f"checkpoint={case.mode}")
    directory = scratch / "run"
    began = time.monotonic()
    if case.who == "disk":
        return disk_full(case, job, directory, expected)
    if case.what in MOMENTS:
        statuses = attempt(job, directory, case)
        assert statuses[0] != 0, "nothing was killed"
    else:
        shutil.copytree(killed_behind_the_third(job, scratch.parent), directory)
    steps = directory / "checkpoints"
    if case.what == "while resuming":
        assert attempt(job, directory, case)[0] != 0, "nothing was killed"
    if case.what in ("truncated", "bit flipped", "removed"):
        damage(checkpoints.newest(steps), case.what, case.who)
    if case.what == "all damaged":
        for path in checkpoints.complete(steps):
            damage(path, "bit flipped", "shard")
        assert attempt(job, directory)[1:] == [1] * RANKS
        log = (directory / "attempts/2/rank_0.log").read_text()
        assert "is intact" in log and "Traceback" not in log
        return {"lost": None, "seconds": time.monotonic() - began}
    intact = [checkpoints.step_of(path) for path in checkpoints.complete(steps) if not checkpoints.damage(path)]
    reached = max([0, *(row for row in losses(directory))])
    return finish(job, directory, expected, intact, reached, began)


def finish(
    job: Job, directory: Path, expected: dict[int, float], intact: list[int], reached: int, began: float
) -> dict:
    """Resume the run, let it end, and check the result."""
    statuses = attempt(job, directory)
    assert statuses == [0] * (RANKS + 1), (statuses, (directory / "attempts/2/rank_0.log").read_text()[-2000:])
    start = started_from(directory)
    assert start == max(intact, default=0), f"went on from {start}, and {intact} were intact"
    assert losses(directory) == expected, "losses differ"
    due = reached // INTERVAL * INTERVAL
    assert due - start <= INTERVAL, f"the save of step {due} had been due, and the run went on from {start}"
    steps = directory / "checkpoints"
    left = [path.name for path in steps.iterdir() if path.suffix in (".writing", ".deleting")]
    assert not left, left
    kept = checkpoints.complete(steps)
    assert [checkpoints.step_of(path) for path in kept] == [STEPS - INTERVAL, STEPS] and not any(
        map(checkpoints.damage, kept)
    )
    return {"lost": reached - start, "seconds": time.monotonic() - began}


def killed_behind_the_third(job: Job, scratch: Path) -> Path:
    """Return a run with complete checkpoints of steps 6 and 9 that was killed in step 11; it is made only once."""
    directory = scratch / f"killed-{job.checkpoint.name}"
    if not directory.exists():
        assert attempt(job, directory, Case(job.checkpoint.name, "next step"))[0] != 0
    return directory


def disk_full(case: Case, job: Job, directory: Path, expected: dict[int, float]) -> dict:
    """The run's file system is small, and full from step 4 on. In the second kind of case there is space again at step
    8.
    """
    began = time.monotonic()
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(directory)], check=True)
    try:
        freed = case.what == "disk full, freed"
        ballast = directory / "ballast"
        statuses = attempt(job, directory, before=lambda rank: fill_disk(ballast, freed) if rank == 0 else None)
        events = [row["event"] for row in map(json.loads, (directory / "events.jsonl").read_text().splitlines())]
        if freed:
            assert statuses == [0] * (RANKS + 1), statuses
            assert events == ["checkpoint", "checkpoint_failed", "checkpoint_failed", "checkpoint", "checkpoint"], (
                events
            )
            assert losses(directory) == expected
            return {"lost": 0, "seconds": time.monotonic() - began}
        assert statuses[1:] == [1] * RANKS, statuses
        assert events == ["checkpoint"] + ["checkpoint_failed"] * 4, events
        assert "No space left" in (directory / "attempts/1/rank_0.log").read_text()
        ballast.unlink()
        reached = max(losses(directory))
        outcome = finish(job, directory, expected, [3], 3, began)
        return outcome | {"lost": reached - 3}
    finally:
        subprocess.run(["umount", str(directory)], check=True)


def main(numbers: list[int]) -> int:
    """Run cases, print the result of each, and count them."""
    everything = cases()
    chosen = numbers or range(1, len(everything) + 1)
    failed, lost = [], Counter()
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        job = compose_job(*OVERRIDES)
        assert attempt(job, Path(scratch) / "undisturbed") == [0] * (RANKS + 1), "the undisturbed run"
        expected = losses(Path(scratch) / "undisturbed")
        for number in chosen:
            case, place = everything[number - 1], Path(scratch) / str(number)
            place.mkdir()
            try:
                outcome = run(case, expected, place)
                lost[outcome["lost"]] += 1
                print(f"{number:3}  {case!s:36}  steps lost {outcome['lost']}  {outcome['seconds']:.1f} s", flush=True)
            except AssertionError as error:
                failed.append(number)
                print(f"{number:3}  {case!s:36}  BROKEN: {error}", flush=True)
            shutil.rmtree(place, ignore_errors=True)
    print(
        f"{len(chosen)} cases, {len(failed)} broken {failed or ''}; steps lost: "
        + ", ".join(f"{steps} ({count} times)" for steps, count in sorted(lost.items(), key=lambda item: item[0] or 0))
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
