"""The weights from which a run starts: the folder that checkpoint.initial_load_path means, found once and written down
with a digest, as "the newest step of that run" means another one later. Imports no torch.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

from titan_hydra.base.errors import ConfigError
from titan_hydra.config.files import home
from titan_hydra.job.inputs import digest_of_file

from . import layout
from .checkpoints import newest


def is_hf(source: Path) -> bool:
    """Whether a folder has weights in Hugging Face's format."""
    return any(source.glob("*.safetensors"))


def complete_at(place: Path) -> Path | None:
    """Return `place` if it is a complete checkpoint; if it is a run or a checkpoints folder, return its newest step.
    None if the folder holds no step.
    """
    return place if (place / ".metadata").is_file() else newest(layout.CHECKPOINTS.of(place)) or newest(place)


def find_weights(path: str) -> Path:
    """Return the folder that checkpoint.initial_load_path names now: `path` itself or, if it is a run, its newest step."""
    source = home(path).absolute()
    found = source if is_hf(source) else complete_at(source)
    if found is None:
        raise ConfigError(f"checkpoint.initial_load_path={path}: no checkpoint, no run with one, and no *.safetensors")
    return found


def digest_of_weights(folder: Path) -> str:
    """Return a digest of a checkpoint or Hugging Face folder: of its manifest, which has the checksums of all files, or
    else of the names, sizes and some pieces of its weight files.
    """
    manifest = layout.MANIFEST.of(folder)
    if manifest.is_file():
        return hashlib.sha256(manifest.read_bytes()).hexdigest()
    files = [file for file in sorted(folder.iterdir()) if file.suffix in (".safetensors", ".distcp")]
    whole = hashlib.sha256()
    for file in files:
        whole.update(f"{file.name} {digest_of_file(file, file.stat().st_size)}\n".encode())
    return whole.hexdigest()


def initial_weights(directory: Path, path: str) -> Path:
    """Return the folder of the weights from which the run of a directory started. If that was never written down, it is
    what `path` names now. Raises ConfigError if the folder is gone, or holds other weights than then.
    """
    record = layout.BASE.read(directory)
    if not record:
        return find_weights(path)
    folder, key = Path(record["folder"]), f"checkpoint.initial_load_path={path}"
    if not folder.is_dir():  # perhaps the run that it belongs to was moved
        with contextlib.suppress(ConfigError):
            found = find_weights(path)
            folder = found.with_name(folder.name) if found.name.startswith("step-") else found
    if not folder.is_dir():
        raise ConfigError(f"{key}: {record['folder']}, from which this run started, is gone")
    if digest_of_weights(folder) != record["digest"]:
        raise ConfigError(
            f"{key}: {folder} has other weights than when this run started from it; "
            "put those back, or start a run anew with launch.force=true"
        )
    return folder


def record_weights(directory: Path, path: str) -> None:
    """Write down from which folder a run starts, unless that is known already."""
    if not layout.BASE.read(directory):
        folder = find_weights(path)
        layout.BASE.write(directory, {"folder": str(folder), "digest": digest_of_weights(folder)})
