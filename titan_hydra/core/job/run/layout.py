"""The files of a run directory and of a sweep: each file's name, writer and content, and the shape of its JSON.

If a JSON file has another shape, readers treat it as damaged, and a damaged file as absent. The command `python -m
titan_hydra.core.job.run.layout` prints the table of docs/architecture.md.
"""

import contextlib
import json
import os
import re
import typing
import zlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from titan_hydra.core.base.plain import MOST_ROW, NotPlain, open_plain, plain_lines, read_plain
from titan_hydra.core.base.text import all_printable, printable
from titan_hydra.core.job.config.files import read_json, write_json
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.ranks import DEGREES

from .shapes import Each, Fields, Moment, Place, Test, test_of


@dataclass(frozen=True, eq=False)
class Entry:
    """A kind of file or folder. `name` is a path relative to the folder that each method is given as `folder`; <n>, <r>
    and <g> in the path stand for a number.
    """

    name: str
    writer: str
    holds: str
    shape: Any = dict  # shape of a JSON file, or of each row of a .jsonl file
    copy: str = ""  # name of a second file with the same content, which is read if the first is damaged

    def of(self, folder: Path, number: int | str = 0) -> Path:
        return folder / re.sub("<.+>", str(number), self.name)

    def all(self, folder: Path) -> dict[int, Path]:
        """Return the paths of this kind in a folder, by number in ascending order. Names without a plain number of at
        most six digits, such as 1.bak, are left out: readers count up to the largest number.
        """
        pattern = re.compile(re.sub("<.+>", "(0|[1-9][0-9]{0,5})", self.name.rstrip("/")))
        paths = {
            path.relative_to(folder).as_posix(): path
            for path in folder.glob(re.sub("<.+>", "*", self.name.rstrip("/")))
        }
        return dict(sorted((int(match[1]), path) for name, path in paths.items() if (match := pattern.fullmatch(name))))

    @cached_property
    def intact(self) -> Test:
        """A function that tests whether a JSON value has the shape of this kind of file."""
        return test_of(self.shape)

    def read(self, folder: Path, number: int | str = 0) -> dict[str, Any]:
        """Read a JSON object; {} if the file, and its copy if it has one, is missing or damaged. Raises OSError if this
        user may not read it.
        """
        for path in (self.of(folder, number), folder / self.copy) if self.copy else (self.of(folder, number),):
            content = read_json(path)
            if content is None or (CHECKSUM in content and content.pop(CHECKSUM) != sum_of(content)):
                continue
            if self.intact(content):
                return all_printable(content)
        return {}

    def read_all(self, folder: Path) -> dict[int, dict[str, Any]]:
        """Read all JSON objects of this kind in a folder, by number."""
        return {number: self.read(folder, number) for number in self.all(folder)}

    def text(self, folder: Path, number: int | str = 0) -> str:
        """Read a small text; "" if the file is missing, or if this user may not read it."""
        try:
            return printable(read_plain(self.of(folder, number)).decode(errors="replace"))
        except (OSError, NotPlain):
            return ""

    def write(self, folder: Path, content: dict[str, Any], number: int | str = 0) -> None:
        """Write a JSON object, atomically and durably. If the file has a copy, write both, with a checksum."""
        if self.copy:
            content = content | {CHECKSUM: sum_of(content)}
            write_json(folder / self.copy, content)
        write_json(self.of(folder, number), content)

    def rows(self, folder: Path, number: int = 0) -> tuple[list[dict[str, Any]], int]:
        """Return the intact rows of a .jsonl file, and the number of damaged rows. If the last row has no line end, it
        is not counted as damaged, as a process may still be writing it.
        """
        path, rows, damaged = self.of(folder, number), [], 0
        try:
            for line in plain_lines(path):
                if (row := self._row(line)) is not None:
                    rows.append(row)
                elif line != b"\n" and (line.endswith(b"\n") or len(line) == MOST_ROW):
                    damaged += 1
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError, NotPlain):
            return [], int(os.path.lexists(path))
        return rows, damaged

    def last(self, folder: Path) -> dict[str, Any]:
        """Return the last intact row among the last two lines of a .jsonl file; {} if neither is intact. A process may
        still be writing the last line.
        """
        return (self.newest(folder, 2) or [{}])[-1]

    def newest(self, folder: Path, count: int) -> list[dict[str, Any]]:
        """Return the intact rows among the last `count` lines of a .jsonl file. At most 4 kB are read per line."""
        lines = last_lines(self.of(folder), count, 4096 * count).splitlines()
        return [row for line in lines if (row := self._row(line.encode())) is not None]

    def _row(self, line: bytes) -> dict[str, Any] | None:
        """Return the row of a line, without its checksum; None if it has another shape or another checksum."""
        with contextlib.suppress(ValueError, RecursionError):
            if self.intact(row := json.loads(line)) and right_sum(line):
                row.pop(CHECKSUM, None)
                return all_printable(row) if b"\\" in line or not line.isascii() or b"\x7f" in line else row
        return None


CHECKSUM = "crc32"  # a field of result.json and attempt.json, and the last field of a row that rank 0 writes


def sum_of(content: dict[str, Any]) -> str:
    """Return the checksum of the values of a JSON object, however the file is indented."""
    return f"{zlib.crc32(json.dumps(content, sort_keys=True).encode()):08x}"


def with_sum(row: dict[str, Any]) -> bytes:
    """Return a row of a .jsonl file as a line, with a checksum as its last field."""
    line = json.dumps(row).encode()
    return line[:-1] + f', "{CHECKSUM}": "{zlib.crc32(line):08x}"}}\n'.encode()


def right_sum(line: bytes) -> bool:
    """Whether the row in a line has the checksum that it names. Rows of earlier versions name none."""
    checksum = re.search(f', "{CHECKSUM}": "([0-9a-f]{{8}})"}}\\s*$'.encode(), line)
    if checksum is None:
        return f'"{CHECKSUM}"'.encode() not in line
    return int(checksum[1], 16) == zlib.crc32(line[: checksum.start()] + b"}")


def last_lines(path: Path, count: int = 30, limit: int = 65536) -> str:
    """Return the last `count` lines of a log, within its last `limit` bytes; "" if it cannot be read."""
    try:
        with open_plain(path) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - limit, 0))
            return printable("\n".join(file.read(limit).decode(errors="replace").rstrip().splitlines()[-count:]))
    except (OSError, NotPlain):
        return ""


# fmt: off
NUMBER = float | None
PROCESS = {"pid": int, "host": str, "born": str | None}
ENDED = {"ended": Moment, "exit_status": int | None, "host": str, "killed": bool}
ERROR = Fields({"type": str, "message": str, "traceback": str, "time": Moment, "secondary": bool},
               {"host": str | None, "step": int, "peak_gib": float, "capacity_gib": float})
OWNER = Fields(PROCESS | {"started": Moment}, {"ended": Moment, "executor": str, "here": bool, "token": None, "packed": bool,
                                                      "slurm_state": str | None,
                                                      "refused": str})
SUBMITTER = Fields(OWNER.needed | {"job_id": str | None, "token": str, "user": str}, OWNER.others | {
    "token": str, "index": int, "cluster": str, "namespace": str, "end": dict})
OPERATION = {"group": str, "seq": int, "op": str, "time": float}
LAUNCHER, FIRST, EVERY, LOCAL, SCRIPT, GROUPS = "launcher", "rank 0", "all ranks", "local launcher", "batch script", "replica groups"

KEYS = typing.get_type_hints(Job)
CONFIG = Entry("config.json", LAUNCHER, "the resolved configuration; its hash is in the run directory's name", Fields(
    {"model": KEYS["model"]}, KEYS))  # beside converted weights, config.json has only `model`
FIRST_CONFIG = Entry("config_first.json", LAUNCHER, "of a run whose layout changes (`titan resume`, `elastic`): config.json of the first "
                     "attempt, from which the hash was computed", CONFIG.shape)
LAYOUT = Entry("layout_<n>.json", LAUNCHER, "of an elastic run: the config.json that its batch script takes on n nodes",
               CONFIG.shape)
OVERRIDES = Entry("overrides.txt", LAUNCHER, "the overrides that were typed, a line each")
RUN_ID = Entry("id.json", LAUNCHER, "the run's id for trackers: its hash and four digits, drawn when this directory was created", Fields(
    {"id": str}))
ENV = Entry("env.json", LAUNCHER, "commit, versions, host, devices; each attempt's folder has such a file too", Fields({}, {
    "git_sha": str | None, "git_diff": str | None, "git_untracked": list[str], "code": str, "versions": dict[str, str], "host": str,
    "platform": str, "folder": Place, "accepted": Each(Fields({"attempt": int | None, "key": str, "was": str, "now": str})),
    "files": Each(Fields({"word": str, "path": str, "count": int, "bytes": int, "digest": str, "sampled": bool}), named=True)}))
BASE = Entry("base.json", LAUNCHER, "only of runs from before env.json had `files`: the folder of the weights from which the run started",
             Fields({"folder": str}))
FACTS = Entry("facts.json", FIRST, "what came with the run's weights and tokenizer: stop tokens, generation settings, chat templates",
              Fields(dict.fromkeys(("words", "generation", "ids", "templates", "tokenizer"), dict)))
SBATCH = Entry("sbatch.sh", LAUNCHER, "the batch script that was submitted")
JOB_FILE = Entry("job.yaml", LAUNCHER, "the job that was submitted, if it is no batch script")
METRICS = Entry("metrics.jsonl", FIRST, "a row for each logged step: [fields](metrics.md)", Fields(
    {"step": int, "loss": NUMBER}, dict.fromkeys(("loss_mean", "grad_norm", "lr", "tokens_per_second", "tflops", "mfu", "memory_gib",
                                                  "memory_reserved_gib", "step_seconds", "data_seconds", "tokens_seen",
                                                  "slowest_over_median", "others_over_median", "time"),
                                                 NUMBER) | {"slowest_rank": int | None}))
EVENTS = Entry("events.jsonl", FIRST, "validations, checkpoints, changes of replica groups, bad files", Fields(
    {"event": str, "step": int}, {"validation_loss": NUMBER, "seconds": NUMBER, "task": str, "acc": NUMBER, "acc_norm": NUMBER,
                                  "perplexity": NUMBER, "parallelism": str, **dict.fromkeys(("gpus", "local_batch", *DEGREES), int)}))
RESULT = Entry("result.json", FIRST, "the result, once the run is done", Fields({}, dict.fromkeys((
    "final_loss", "validation_loss", "lowest_validation_loss", "tokens_per_second", "tokens_per_second_iqr", "memory_gib", "mfu", "seconds",
    "goodput", "gpu_hours", "flops_per_token"), NUMBER) | {
    "status": str, "steps": int, "measured_steps": int | None, "lowest_validation_step": int | None,
    "best_checkpoint": str | None, "tasks": Each(dict[str, float], named=True), "tokens": int, "parameters": int,
    "world_size": int, "device": str | None, "git_sha": str | None,
    "versions": dict[str, str]}))
CHECKPOINTS = Entry("checkpoints/", EVERY, "`step-<n>/`: weights, optimizer, each rank's data state, the manifest; "
                    "`step-<n>.damaged`: one that failed its checksums, set aside")
MANIFEST = Entry("manifest.json", FIRST, "in a step of `checkpoints/`: every other file with its size and checksum", Fields(
    {"step": int, "world_size": int, "time": Moment, "files": Each(Fields({"bytes": int, "crc32": str}), named=True)},
    {"validation_loss": NUMBER}))
SCHEDULE = Entry("schedule.json", FIRST, "what each pipeline rank computes, in order", Fields(
    {"ranks": Each(Each(Fields({"stage": int, "kind": str, "microbatch": int})))}))
EXPORT = Entry("export/", EVERY, "the last weights alone (`checkpoint.export_dtype`)")
REPLICA = Entry("replicas/<g>/", "group g", "the run's files of replica group g (the first has the run's own); if it is a job of "
                "its own, `attempts/` too")
MEETINGS = Entry("meetings/", GROUPS, "files by which the groups find each other, and torchft's lighthouse; in the attempt if the "
                 "groups are no jobs of their own")
TENSORBOARD = Entry("tensorboard/", FIRST, "copies of the rows")
WANDB = Entry("wandb/", FIRST, "copies of the rows")
ATTEMPT = Entry("attempts/<n>/", "", "one start of the run:")
OF_RUN = (CONFIG, FIRST_CONFIG, LAYOUT, OVERRIDES, RUN_ID, ENV, BASE, FACTS, SBATCH, JOB_FILE, METRICS, EVENTS, RESULT,
          CHECKPOINTS, MANIFEST, SCHEDULE, EXPORT, REPLICA, MEETINGS, TENSORBOARD, WANDB, ATTEMPT)

CLAIM = Entry("attempt.json", LAUNCHER, "who claimed it, when, its executor, where it runs, its job; `attempt_copy.json` is the same, "
              "should one be damaged", (SUBMITTER, OWNER), "attempt_copy.json")
RANKS = Entry("ranks.json", LOCAL, "processes, exit statuses, when each ended; other runs that used the machine meanwhile", Fields(
    {}, PROCESS | {"ended": Moment, "ranks": Each(Fields({}, ENDED)), "beside": list[str]}))
RANK = Entry("rank_<r>.json", "rank r", "process, exit status, error, load of the machine", Fields({}, PROCESS | ENDED | {
    "started": Moment, "error": (ERROR, None), "load": Fields({}, dict.fromkeys(("cores", "start", "end"), float))}))
LOG = Entry("rank_<r>.log", "rank r", "its output")
STATUS = Entry("status.json", FIRST, "the last step that is done", Fields({"step": int}, {"time": Moment}))
BEAT = Entry("beat_<r>.json", "rank r", "the step and the phase that it is in", Fields(
    {"step": int, "phase": str, "count": int, "since": Moment, "time": Moment}, {"asked": Moment}))
FLIGHT = Entry("flight_<r>.json", "rank r", "after a hang, an error, or on demand: the last collectives, stacks", Fields({
    "rank": int, "time": Moment, "timeout": float, "step": int, "phase": str, "since": Moment, "host": str, "stacks": dict[str, list[str]],
    "groups": Each(Fields({"mesh": str, "ranks": list[int]}), named=True), "collectives": Each(Fields(OPERATION, {"sizes": list})),
    "messages": Each(Fields(OPERATION | {"size": Any, "peer": int, "done": bool})), "steps": list[list[float]]}))
MEMORY = Entry("memory_<r>.txt", "rank r", "after running out of device memory: what is allocated, and where")
PROFILE = Entry("profile/", EVERY, "what `profiling=on` records")
ACTIVATIONS = Entry("activations_<r>.jsonl", "rank r", "what `debug.trace_activations` records", Fields(
    {"step": int, "pass": str, "what": str, "module": str, "call": int, "order": list[float], "hash": str}, {"norm": float | str}))
RENDEZVOUS = Entry("rendezvous", FIRST, "the address at which the ranks find each other")
PARENT_LOG = Entry("parent.log", LOCAL, "the output of the ranks' parent process")
JOB_LOG = Entry("job.log", SCRIPT, "what the job itself printed, before and beside its ranks")
OWN_JOB = Entry("job", SCRIPT, "the job that owns the attempt")
GROWTH = Entry("growth", SCRIPT, "of an elastic run that grows: seconds between two checks for free nodes; then, if the run was requeued "
               "to grow, the nodes that it had")
EXIT = Entry("exit", SCRIPT, "a mark: the ranks' exit status")
STOPPED = Entry("stopped", EVERY, "how a stop came: the ranks agreed, or one was blocked")
CANCELLED = Entry("cancelled", "`titan stop`", "a mark: who cancelled, and when", Fields({}, {"by": str, "time": Moment}))
SPENT = Entry("requeues_spent", SCRIPT, "a mark: no requeue is left")
NODE = Entry("node_<n>.json", "node n", "the process that started the ranks of a node, and how they ended", Fields(
    {}, PROCESS | {"name": str, "node": str, "ranks": Each(Fields({}, ENDED), named=True), "exit_status": int, "asked": bool}))
NODES = Entry("nodes.json", "node 0", "the nodes whose ranks run in the attempt", Fields({"names": list[str]}))
REPLACED = Entry("replaced", "node n", "a mark: another process has come in place of a node's")
OF_ATTEMPT = (CLAIM, RANKS, RANK, LOG, STATUS, BEAT, FLIGHT, MEMORY, PROFILE, ACTIVATIONS, RENDEZVOUS, PARENT_LOG, JOB_LOG, OWN_JOB,
              GROWTH, EXIT, STOPPED, CANCELLED, SPENT, NODE, NODES, REPLACED)

SWEEPS = Entry("_sweeps/", LAUNCHER, "a folder for each sweep")
SWEEP = Entry("manifest.json", LAUNCHER, "in the folder of a sweep: its cells", Fields(
    {"name": str, "command": list[str], "baseline": str | None, "cells": Each(Fields(
        {"name": str, "directory": Place, "overrides": list[str]}, {"hash": str, "repeat": bool}))}, {"created": Moment}))
RATES = Entry("hardware.json", "`titan rates tune`", "in the folder of a sweep: the rates of hardware fitted to its runs")
JOURNAL = Entry("optuna.journal", "the search's driver", "in the folder of a sweep whose cells a search draws: Optuna's journal")
DRIVER = Entry("driver.lock", "the search's driver", "the process that draws the cells, and holds a lock on this file")
LEASE = Entry("driver.lease", "the search's driver", "the same where the file system has no locks: only one process can create it")
CODE = Entry("_code/", LAUNCHER, "the snapshots of code that runs import")
CODE_STATE = Entry("<hash>.json", LAUNCHER, "in `_code/`, beside a snapshot: its commit and uncommitted changes, for env.json", Fields({}, {
    "git_sha": str | None, "git_diff": str | None, "git_untracked": list[str]}))
FILES = Entry("_files/", LAUNCHER, "sizes, times and digests of large sets of files that runs read")
FILES_TABLE = Entry("<path>.json", LAUNCHER, "in `_files/`: the table of one set of files", Fields({"path": str, "entries": dict}))
GONE = Entry("_gone/", "`titan runs`", "a file for each cell of a sweep that was removed, archived or moved away")
GONE_RUN = Entry("<run>.json", "`titan runs`", "in `_gone/`: what became of the run of this name, when, and by whom", Fields(
    {"word": str, "by": str, "time": Moment}, {"to": Place}))
PROOFS = Entry("_proofs/", "`titan verify`", "a folder for each proof of a layout: the layout's hash and the code's digest")
PROOF = Entry("proof.json", "`titan verify`", "in the folder of a proof: what was proven (`experiments/runs/proofs.py` has its shape)")
ARCHIVED = Entry("archive.json", "`titan runs archive`", "the last member of an archive: its runs, and a checksum of every other member",
                 Fields(
    {"runs": list[str], "sweeps": list[str], "files": Each(Fields({"sha256": str}), named=True), "left_out": list[str]}, {
        "time": Moment, "by": str}))
# fmt: on


def table_of_files() -> str:
    """Return the table of files in docs/architecture.md."""
    entries = [*(("", entry) for entry in OF_RUN), *(("· ", entry) for entry in OF_ATTEMPT)]
    return "\n".join(f"| `{mark}{entry.name}` | {entry.writer} | {entry.holds} |" for mark, entry in entries)


if __name__ == "__main__":
    print(table_of_files())


def runs_of(job: Job) -> Path:
    """Return the folder that holds the run directories of a job."""
    return Path(job.paths.runs).expanduser().absolute()
