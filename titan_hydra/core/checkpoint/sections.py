"""The sections of the config.json of the run to which a checkpoint belongs. Imports no torch."""

from pathlib import Path

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.files import read_json
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.base import complete_at


def find_checkpoint(source: Path) -> Path:
    """Return `source` if it is a complete checkpoint; if it is a run or a checkpoints folder, return its newest
    checkpoint. Raises ConfigError if there is none.
    """
    if not source.is_dir():
        raise ConfigError(f"{source}: no such folder")
    found = complete_at(source)
    if found is None:
        raise ConfigError(
            f"{source}: not a complete checkpoint (it has no .metadata), and no run with one in checkpoints/step-*"
        )
    return found


def as_started(config_file: Path, path: str) -> str:
    """Resolve a path in a run's configuration against the folder in which the run was started."""
    started = layout.ENV.read(config_file.parent).get("folder", "")
    return str(Path(started, Path(path).expanduser()))


def find_section(name: str, checkpoint: Path, config_file: Path | None = None) -> tuple[Path, dict]:
    """Return the path of the checkpoint's config.json that has a section, and the section. If no file has it, the
    section is {}.
    """
    candidates = [config_file] if config_file else config_files(checkpoint)
    for file in candidates:
        if section := (read_json(file) or {}).get(name):
            return file, section
    return candidates[-1], {}


def config_files(checkpoint: Path) -> list[Path]:
    """Return the paths at which a checkpoint's config.json may lie: in the checkpoint itself (from `import_hf`), one
    folder up (for the export/ of a run), or two folders up (for a step).
    """
    return [layout.CONFIG.of(folder) for folder in (checkpoint, *checkpoint.absolute().parents[:2])]
