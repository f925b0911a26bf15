"""The checkpoints of a run, each the folder of a step: which are complete, whether their bytes are intact, and which
are kept; the folder of weights that a path names, and the sections of the config.json beside it. Imports no torch.

The name of a folder shows its state: `step-N.writing` is being written, `step-N` is complete, `step-N.damaged` was set
aside, `*.deleting` is being deleted. The manifest of a step lists every other file in it with its size and CRC-32, and
is the last file written before the rename that makes the step complete.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import threading
import time
import zlib
from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.plain import NotPlain, open_plain
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.core.job.config.files import home, read_json

from . import layout

# suffixes of folders that are not complete checkpoints
WRITING, DAMAGED, DELETING = ".writing", ".damaged", ".deleting"
CHUNK = 2**24  # number of bytes that are read from a file at a time


def complete(folder: Path) -> list[Path]:
    """Return the complete steps in a checkpoints folder, oldest first. Some may be damaged, which `damage` checks."""
    return sorted(path for path in folder.glob("step-*") if re.fullmatch(r"step-\d+", path.name) and path.is_dir())


def newest(folder: Path) -> Path | None:
    return (complete(folder) or [None])[-1]


def step_folder(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the number N of a folder `step-N` or `step-N.SUFFIX`."""
    return int(path.name.removeprefix("step-").partition(".")[0])


def write_manifest(
    path: Path, step: int, world_size: int, sums: dict[str, tuple[int, int]], held_out: float | None = None
) -> None:
    """Write the manifest of a step. `sums` gives (size, CRC-32) of every file by name; `held_out` is the held-out loss of
    the step's weights, if it was measured.
    """
    files = {name: {"bytes": size, "crc32": f"{crc:08x}"} for name, (size, crc) in sorted(sums.items())}
    text = json.dumps(
        {
            "format": 1,
            "step": step,
            "world_size": world_size,
            "time": time.time(),
            "validation_loss": held_out,
            "files": files,
        },
        indent=1,
    )
    with layout.MANIFEST.of(path).open("w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Read the manifest of a step; None if it is missing or damaged, or if this user may not read it."""
    with contextlib.suppress(OSError):
        manifest = layout.MANIFEST.read(path)
        return manifest if manifest.get("files") else None
    return None


def held_out_loss(path: Path) -> float:
    """Return the held-out loss of a step's weights; infinity if it was not measured."""
    loss = (read_manifest(path) or {}).get("validation_loss")
    return inf if loss is None else loss


def best(folder: Path) -> Path | None:
    """Return the complete step with the lowest held-out loss; if several have it, the first of them. None if no step
    has a loss.
    """
    losses = [(held_out_loss(path), path) for path in complete(folder)]
    return min([(loss, path) for loss, path in losses if loss < inf], default=(inf, None))[1]


def damage(path: Path, rank: int = 0, ranks: int = 1) -> list[str]:
    """Read the files of a step, and return a line for each fault. If several ranks check a step, each reads some files."""
    manifest = read_manifest(path)
    if manifest is None:
        return [f"{layout.MANIFEST.name} is missing or cannot be read"] if rank == 0 else []
    # If the folder was renamed, or restored under another name, its manifest is that of another step.
    if re.fullmatch(r"step-\d+", path.name) and manifest.get("step") != step_of(path):
        return [f"{layout.MANIFEST.name} is that of step {manifest.get('step')}"] if rank == 0 else []
    names = sorted(manifest["files"], key=lambda name: (manifest["files"][name]["bytes"], name))
    return list(filter(None, (_wrong(path / name, manifest["files"][name]) for name in names[rank::ranks])))


def _wrong(file: Path, expected: dict[str, Any]) -> str | None:
    """Return in what a file differs from the size and checksum of the manifest; None if in nothing."""
    try:
        size = file.stat().st_size
        if size != expected["bytes"]:
            return f"{file.name} has {size:,} bytes instead of {expected['bytes']:,}"
        if checksum(file) != expected["crc32"]:
            return f"{file.name} does not match its checksum"
    except FileNotFoundError:
        return f"{file.name} is missing"
    except OSError as error:
        return f"{file.name} cannot be read ({error.strerror})"
    except NotPlain:
        return f"{file.name} is no plain file"
    return None


def checksum(file: Path) -> str:
    """Return the CRC-32 of a file in hex. A CRC detects accidental damage, but no attack (docs/installation.md)."""
    crc = 0
    with open_plain(file) as stream:
        while chunk := stream.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return f"{crc:08x}"


def surplus(folder: Path, keep_latest: int, keep_every: int, keep_best: bool = False) -> list[Path]:
    """Return the complete steps that may be deleted. Kept are the newest `keep_latest` steps (0: all steps), the
    multiples of `keep_every` and, with `keep_best`, the step with the lowest held-out loss.
    """
    old = complete(folder)[:-keep_latest] if keep_latest else []
    best_step = best(folder) if keep_best and old else None
    return [path for path in old if path != best_step and not (keep_every and step_of(path) % keep_every == 0)]


def asked_for(run: Path, step: str | None) -> Path:
    """Return the folder of a run's checkpoint at `step`, which is a number or `best` (the lowest held-out loss). If
    `step` is None, return the run's own folder.

    Raises ConfigError if that checkpoint was not kept. `best` is the best of all validated steps, even if its
    checkpoint was not kept.
    """
    if step is None:
        return run
    folder = layout.CHECKPOINTS.of(run)
    there = {str(step_of(path)): path for path in complete(folder)}
    if step in there:
        return there[step]
    best_step = best(folder)
    if step != "best":
        legal = (*there, "best") if best_step else tuple(there)
        raise bad_value("--step", step, f"{run.name} has no such checkpoint", *legal)
    loss, lowest = lowest_held_out(run)
    if best_step is None or held_out_loss(best_step) > (inf if loss is None else loss):
        reason = (
            "no held-out loss was measured"
            if loss is None
            else f"the lowest held-out loss, {loss:.4f} of step {lowest}, is not kept"
        )
        raise bad_value("--step", step, f"{reason}; checkpoint.keep_best=true keeps it", *tuple(there))
    return best_step


def lowest_held_out(run: Path) -> tuple[float | None, int | None]:
    """Return the lowest held-out loss in a run's events, and the first step with this loss; (None, None) without
    losses.
    """
    rows = (row for row in layout.EVENTS.rows(run)[0] if row["event"] == "validation")
    losses = [(loss, row["step"]) for row in rows if isfinite(loss := row.get("validation_loss") or nan)]
    return min(losses, default=(None, None))


class Bin:
    """Deletes folders in threads. Each folder is renamed first, so that a partly deleted step never looks complete."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    def throw(self, paths: list[Path]) -> None:
        """Rename folders now and delete them in a thread. Print a warning for a folder that cannot be renamed."""
        deleting = []
        for path in paths:
            try:
                deleting.append(path.rename(path.with_name(f"{path.name}.{time.time_ns()}{DELETING}")))
            except OSError as error:
                print(f"warning: {path} cannot be deleted: {error.strerror}", flush=True)
        if deleting:
            self.threads = [thread for thread in self.threads if thread.is_alive()]
            self.threads.append(threading.Thread(target=_delete, args=(deleting,), name="checkpoint-bin", daemon=True))
            self.threads[-1].start()

    def wait(self) -> None:
        for thread in self.threads:
            thread.join()


def _delete(paths: list[Path]) -> None:
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def leftovers(folder: Path) -> list[Path]:
    """Return the unfinished or partly deleted folders that a killed process has left behind."""
    return [*folder.glob(f"step-*{WRITING}"), *folder.glob(f"*{DELETING}")]


def sync_folder(path: Path) -> None:
    """Make the creation and the renaming of files in a folder durable (fsync)."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_hf(source: Path) -> bool:
    """Whether a folder has weights in Hugging Face's format."""
    return any(source.glob("*.safetensors"))


def complete_at(folder: Path) -> Path | None:
    """Return `folder` if it is a complete checkpoint; if it is a run or a checkpoints folder, return its newest step.
    None if the folder holds no step.
    """
    return folder if (folder / ".metadata").is_file() else newest(layout.CHECKPOINTS.of(folder)) or newest(folder)


def find_weights(path: str) -> Path:
    """Return the folder that checkpoint.initial_load_path names now: `path` itself or, if it is a run, its newest step."""
    source = home(path).absolute()
    folder = source if is_hf(source) else complete_at(source)
    if folder is None:
        raise ConfigError(f"checkpoint.initial_load_path={path}: no checkpoint, no run with one, and no *.safetensors")
    return folder


def find_checkpoint(source: Path) -> Path:
    """Return `source` if it is a complete checkpoint; if it is a run or a checkpoints folder, return its newest
    checkpoint. Raises ConfigError if there is none.
    """
    if not source.is_dir():
        raise ConfigError(f"{source}: no such folder")
    checkpoint = complete_at(source)
    if checkpoint is None:
        raise ConfigError(
            f"{source}: not a complete checkpoint (it has no .metadata), and no run with one in checkpoints/step-*"
        )
    return checkpoint


def as_started(config_file: Path, path: str) -> str:
    """Resolve a path in a run's configuration against the folder in which the run was started."""
    started = layout.ENV.read(config_file.parent).get("folder", "")
    return str(Path(started, Path(path).expanduser()))


def find_section(name: str, checkpoint: Path, config_file: Path | None = None) -> tuple[Path, dict[str, Any]]:
    """Return the path of the checkpoint's config.json that has a section, and the section. If no file has it, the
    section is {}.
    """
    candidates = [config_file] if config_file else config_files(checkpoint)
    for file in candidates:
        if section := (read_json(file) or {}).get(name):
            return file, section
    return candidates[-1], {}


def holds_adapters(checkpoint: Path, config_file: Path | None = None) -> bool:
    """Whether a checkpoint holds adapters, and not the frozen weights beside which they were trained."""
    return not is_hf(checkpoint) and find_section("adapter", checkpoint, config_file)[1].get("name", "none") != "none"


def config_files(checkpoint: Path) -> list[Path]:
    """Return the paths at which a checkpoint's config.json may lie: in the checkpoint itself (from `import_hf`), one
    folder up (for the export/ of a run), or two folders up (for a step).
    """
    return [layout.CONFIG.of(folder) for folder in (checkpoint, *checkpoint.absolute().parents[:2])]
