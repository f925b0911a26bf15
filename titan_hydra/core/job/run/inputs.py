"""The files of a run: what they were when the run began, and whether they still are.

env.json "files": {NAME: {word, path, count, bytes, digest, sampled}}, frozen when the run begins
env.json "accepted": [{attempt, key, was, now}], changes that launch.accept_changed has accepted since; without an attempt:
    of a run that is done, whose result is still that of the files under "files"
_files/<path>-<digest>.json: sizes, times and inodes of large sets of files, so that they are read only once
"""

import contextlib
import hashlib
import os
import sys
from collections.abc import Container, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import Fault, Job
from titan_hydra.core.job.config.files import home
from titan_hydra.core.job.inputs import AND_BESIDE, DATA_FILES, MANY, WEIGHTS, WHOLE, Found, Input, inputs_of, look_at

from . import layout
from .checkpoints import find_weights, newest

LOAD_PATH = "checkpoint.initial_load_path"  # the key of the weights from which a run starts
CHANGED = "files_are_those_of_the_start"  # code of the faults


def files_at_start(directory: Path) -> dict[str, Any] | None:
    """Return the record of a run's files, by key; None for a run that began before there was such a record."""
    return layout.ENV.read(directory).get("files")


def files_now(one: Input, runs: Path, before: dict[str, Any] | None = None) -> Found | None:
    """Return the files that an input names now; for weights, those of the checkpoint that the run began from. `before` is
    the record from when the run began, and `runs` the folder of runs.
    """
    if one.word == "weights":
        one = replace(one, path=_weights(one.path, before, runs))
    place = _place(str(home(one.path).absolute()))
    tables = sorted(layout.FILES.of(runs).glob(f"{place}-*.json"), key=_written, reverse=True)
    return look_at(one, [_entries(table) for table in tables[:2]])


def _written(file: Path) -> float:
    with contextlib.suppress(OSError):  # another launcher may have removed it
        return file.stat().st_mtime
    return 0.0


def _entries(table: Path) -> dict[str, list[Any]]:
    """Return the entries of a table; {} if there is none, or if it is damaged, as its name has the digest of its entries."""
    with contextlib.suppress(OSError, TypeError, ValueError):
        entries = layout.FILES_TABLE.read(table.parent, table.stem).get("entries", {})
        if table.stem.endswith(f"-{Found('', entries).digest}"):
            return entries
    return {}


def weights_at(path: str) -> Input:
    """Return the input of the weights from which a run starts."""
    return Input(LOAD_PATH, "weights", path, names=WEIGHTS)


def _weights(path: str, before: dict[str, Any] | None, runs: Path) -> str:
    """Return the folder that holds the weights: of a run, its newest checkpoint, or the one that the run began from. If
    that run was moved together with those in the folder `runs`, it is there.
    """
    try:
        found = find_weights(path)
    except ConfigError:
        parts = Path(before["path"]).parts if before else ()
        places = (runs.joinpath(*parts[-depth:]) for depth in range(min(4, len(parts)), 1, -1))
        return str(next((place for place in places if place.is_dir()), before["path"] if before else path))
    if before is None:
        return str(found)
    began = Path(before["path"])
    if began.is_dir() and began.is_relative_to(home(path).absolute()):
        return str(began)
    moved = found.with_name(began.name)  # the same step of a run that was moved
    return str(moved if found.name.startswith("step-") and moved.is_dir() else found)


def record_weights(directory: Path, path: str) -> None:
    """Record the weights from which a run starts that no launcher has claimed; a launcher has recorded them already."""
    if LOAD_PATH in (files_at_start(directory) or {}) or layout.BASE.read(directory):
        return
    one, environment = weights_at(path), layout.ENV.read(directory)
    if found := files_now(one, directory.parent):
        files = {**environment.get("files", {}), LOAD_PATH: facts_of(one, found)}
        layout.ENV.write(directory, {**environment, "files": files})


def initial_weights(directory: Path, path: str) -> Path:
    """Return the folder of the weights from which the run of a directory started. If that was never recorded, it is what
    `path` names now. Raises ConfigError if the folder is gone, or holds other bytes than then.
    """
    before = (files_at_start(directory) or {}).get(LOAD_PATH)
    if before is None and (earlier := layout.BASE.read(directory)):  # the run began before files were recorded
        before = {"path": earlier["folder"]}
    if before is None:
        return find_weights(path)
    found = files_now(weights_at(path), directory.parent, before)
    if found is None:
        raise ConfigError(f"{LOAD_PATH}={path}: {before['path']}, from which {directory.name} started, is gone")
    if found.digest != before.get("digest", found.digest):
        raise ConfigError(
            f"{LOAD_PATH}={path}: {found.path} holds other bytes than when {directory.name} started from it; put those back, "
            f"or let the command line that started it accept them (launch.accept_changed=[weights])"
        )
    return Path(found.path)


def _place(path: str) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:8]


def facts_of(one: Input, found: Found) -> dict[str, Any]:
    """Return what env.json records of an input."""
    facts = {"word": one.word, "path": found.path, "count": len(found.entries), "bytes": found.bytes}
    return {**facts, "digest": found.digest, "sampled": found.sampled}


def record_files(job: Job, directory: Path, runs: Path, attempt: int) -> dict[str, Any]:
    """Return the fields `files` and `accepted` of env.json for an attempt. A file that has changed since the run began is
    recorded as the run's own only if launch.accept_changed allows it.
    """
    environment = layout.ENV.read(directory)
    before: dict[str, Any] = environment.get("files") or {}
    files, accepted = {}, list(environment.get("accepted") or [])
    for one in inputs_of(job):
        old = before.get(one.name)
        if (found := files_now(one, runs, old)) is None:
            files |= {one.name: old} if old else {}
            continue
        new = facts_of(one, found)
        if old is None or new["digest"] == old["digest"] or one.word in job.launch.accept_changed:
            files[one.name] = new
            _keep_table(found, runs)
        else:
            files[one.name] = old
        if old and files[one.name]["digest"] != old["digest"]:
            accepted.append({"attempt": attempt, "key": one.name, "was": old["digest"], "now": new["digest"]})
    return {"files": files, **({"accepted": accepted} if accepted else {})}


def _keep_table(found: Found, runs: Path) -> None:
    """Keep the table of a large set of files. Without it, a later start reads the files again: so it is left out where it
    cannot be written.
    """
    if len(found.entries) > MANY or found.bytes > WHOLE:
        table = layout.FILES_TABLE.of(layout.FILES.of(runs), f"{_place(found.path)}-{found.digest}")
        with contextlib.suppress(OSError, UnicodeError):
            table.parent.mkdir(parents=True, exist_ok=True)
            layout.FILES_TABLE.write(table.parent, {"path": found.path, "entries": found.entries}, table.stem)


def accept_of_done(job: Job, directory: Path, runs: Path) -> None:
    """Record the changes that launch.accept_changed accepts of a run that is done and so has no further attempt: later
    command lines then show its result without the word. `files` stay those that it has read.
    """
    environment = layout.ENV.read(directory)
    before, known = environment.get("files") or {}, list(environment.get("accepted") or [])
    found = [(one, files_now(one, runs, before[one.name])) for one in inputs_of(job) if one.name in before]
    now = {one.name: there.digest for one, there in found if there and one.word in job.launch.accept_changed}
    new = [_accepted(name, before[name], digest) for name, digest in now.items() if digest != before[name]["digest"]]
    if new := [one for one in new if one not in known]:
        layout.ENV.write(directory, {**environment, "accepted": known + new})


def _accepted(name: str, old: dict[str, Any], digest: str) -> dict[str, Any]:
    return {"attempt": None, "key": name, "was": old["digest"], "now": digest}


def changes(job: Job, directory: Path, runs: Path, without: str = "", done: bool = False) -> Iterator[Fault | str]:
    """Compare the files of a run, except those of the key `without`, with those from when it began. Yield a fault for
    each key whose files hold other bytes, and a line for each that has the same bytes in another place, or in which a
    change may not have been seen. `done`: the run is done and only shown, so what was accepted then counts.
    """
    earlier = layout.ENV.read(directory).get("accepted") or [] if done else []
    before, compared = files_at_start(directory), [one for one in inputs_of(job) if one.key != without]
    if before is None:
        if compared:
            yield f"{directory.name}: began before files were recorded; what they are now is recorded"
        return
    told: set[str] = set()  # the keys that were named already
    for one in compared:
        if (old := before.get(one.name)) is None or (one.key in told and one.name == f"{one.key}{AND_BESIDE}"):
            continue
        found = files_now(one, runs, old)
        told |= {one.key} if found is None or found.digest != old["digest"] or found.path != old["path"] else set()
        if found is None:
            if one.word != "weights" or not newest(layout.CHECKPOINTS.of(directory)):
                reason = f"names no files here; when {directory.name} began, it was {old['path']}"
                yield Fault(one.key, one.path, reason, code=CHANGED)
        elif found.digest != old["digest"] and (
            one.word in job.launch.accept_changed or _accepted(one.name, old, found.digest) in earlier
        ):
            yield f"{one.key}={one.path}: other bytes than when {directory.name} began; accepted"
        elif found.digest != old["digest"]:
            moved = "" if found.path == old["path"] else f" (then {old['path']}, now {found.path})"
            now = facts_of(one, found)
            sizes = f"{_size(old)} then, {_size(now)} now"
            reason = (
                f"holds other bytes than when {directory.name} began{moved}: {sizes}; "
                f"launch.accept_changed=[{one.word}] goes on with them, launch.force=true begins anew, and another name is another run"
            )
            yield Fault(one.key, one.path, reason, code=CHANGED)
        elif found.path != old["path"]:
            yield f"{one.key}={one.path}: is {found.path} now, and was {old['path']} when {directory.name} began; same bytes"
        elif found.sampled and _written_since(found, runs):
            yield (
                f"{one.key}={one.path}: was written since {directory.name} began; the parts that are compared of its large "
                "files are the same"
            )


def _size(facts: dict[str, Any]) -> str:
    files = f" in {facts['count']:,} files" if facts["count"] > 1 else ""
    return f"{facts['bytes']:,} bytes{files} (digest {facts['digest'][:8]})"


def check_files(jobs: dict[Path, Job], runs: Path, without: str = "", done: Container[Path] = ()) -> list[Fault]:
    """Return the faults of `changes` for several runs, by directory. Print the other lines."""
    found = [one for folder, job in jobs.items() for one in changes(job, folder, runs, without, folder in done)]
    for line in dict.fromkeys(one for one in found if isinstance(one, str)):
        print(line, file=sys.stderr)
    return [one for one in found if isinstance(one, Fault)]


@contextlib.contextmanager
def at_first_folder(job: Job, directory: Path) -> Iterator[None]:
    """Let relative paths of a run's files mean what they meant at the first start: work in the folder of that start.
    Raises ConfigError if that folder is not there. Without relative paths, nothing changes.
    """
    folder = layout.ENV.read(directory).get("folder")
    relative = [one for one in inputs_of(job) if not home(one.path).is_absolute()]
    if not folder or not relative:
        yield
        return
    if not Path(folder).is_dir():
        one = relative[0]
        raise ConfigError(f"{one.key}={one.path}: {directory.name} began in {folder}, and there is no such folder here")
    with contextlib.chdir(folder):
        yield


def data_signature(directory: Path) -> dict[str, str]:
    """Return the digest of the files of data with which a run began, for the state of its order; {} if it reads none."""
    files = (files_at_start(directory) or {}).values()
    if digests := [one["digest"] for one in files if one["word"] == "data"]:
        return {DATA_FILES: " ".join(digests)}
    return {}


def _written_since(found: Found, runs: Path) -> bool:
    """Whether a file of which only pieces are compared has another time or inode than when it was recorded."""
    table = _entries(layout.FILES_TABLE.of(layout.FILES.of(runs), f"{_place(found.path)}-{found.digest}"))
    return any(
        entry[0] > found.whole and table.get(name, entry)[1:3] != entry[1:3] for name, entry in found.entries.items()
    )
