"""Import the modules of a run (train.imports) where a command only reads it: never code that somebody else has named."""

import os
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.user_code import digest, require_user_modules, sources

from . import layout


def import_modules(directory: Path) -> None:
    """Import a run's modules if this user started the run and their sources are those of its start; so a command that
    reads runs executes nothing else. Raises ConfigError otherwise, or if a module cannot be imported.
    """
    train = layout.CONFIG.read(directory).get("train", {})
    modules = train.get("imports", [])
    if not modules:
        return
    named = (
        f"{directory.name}: its modules ({', '.join(map(str, modules))}) are not imported by a command that only reads"
    )
    if layout.CONFIG.of(directory).stat().st_uid != os.getuid():
        raise ConfigError(f"{named}: another user started the run")
    if not sources(modules):
        require_user_modules(modules)  # says which module is not here; there is nothing that it could run
    if train.get("sources") is None or digest(modules) != train["sources"]:
        raise ConfigError(f"{named}: they are other ones than when the run was started")
    require_user_modules(modules)
