"""Write a sweep's manifest: its cells and their directories. find.py documents the format.

The job that runs a cell is recorded in the folder of the cell's attempt and not here, so that two launchers of the same
sweep write different files.
"""

import getpass
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from titan_hydra.core.base.redact import redact
from titan_hydra.core.job.config import identity
from titan_hydra.core.job.run import layout


def folder_of(cells: list[Any]) -> Path | None:
    """Write the manifest of a sweep and return the sweep's folder. If the same cells were started earlier, this is the
    folder of that start, else a new folder. Return None for a single cell, which is no sweep.
    """
    if len(cells) == 1:
        return None
    job, rows = cells[0].job, [entry_of(cell) for cell in cells]
    name = re.sub(r"[^\w.=+,-]+", "-", job.sweep.name or "sweep")
    about = {
        "name": name,
        "command": list(map(redact, sys.argv[1:])),
        "baseline": job.sweep.baseline,
        "packed": job.launch.packed,
    }
    sweeps = layout.SWEEPS.of(cells[0].runs)
    for folder in sorted(sweeps.glob(f"{name}-*"), reverse=True):
        content = layout.SWEEP.read(folder)
        known = [cell for cell in content.get("cells", []) if not cell.get("repeat")]
        if content.get("name") == name and [cell["hash"] for cell in known] == [cell["hash"] for cell in rows]:
            layout.SWEEP.write(
                folder, {**content, **about, "cells": rows + [cell for cell in content["cells"] if cell.get("repeat")]}
            )
            return folder
    mine = new_folder(sweeps, f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    layout.SWEEP.write(mine, {**about, "created": time.time(), "user": getpass.getuser(), "cells": rows})
    return mine


def new_folder(parent: Path, name: str) -> Path:
    """Create the folder `name`. If another sweep has begun in the same second, create `name-2` (`name-3`, ...) instead."""
    folder, number = parent / name, 1
    while True:
        try:
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            folder = parent / f"{name}-{number}"


def entry_of(cell: Any) -> dict[str, Any]:
    place = os.path.relpath(cell.directory, cell.runs)
    return {"name": cell.name, "overrides": cell.overrides, "hash": identity(cell.job), "directory": place}


def put_cell(folder: Path, name: str, cell: dict[str, Any], order: Callable[[dict[str, Any]], tuple[Any, ...]]) -> None:
    """Put a cell into the manifest of a sweep that grows while it runs, in place of the cell of the same `order`, by which
    the cells are sorted. The first cell begins the manifest.
    """
    content = layout.SWEEP.read(folder) or {
        "name": name,
        "baseline": None,
        "packed": False,
        "created": time.time(),
        "user": getpass.getuser(),
        "cells": [],
    }
    others = [listed for listed in content["cells"] if order(listed) != order(cell)]
    about = {"command": list(map(redact, sys.argv[1:])), "cells": sorted([*others, cell], key=order)}
    if {**content, **about} != content:
        layout.SWEEP.write(folder, {**content, **about})


def add_cell(folder: Path, cell: dict[str, Any]) -> None:
    """Add a cell to a sweep's manifest that is not on the command line: the repetition of the baseline at the end."""
    content = layout.SWEEP.read(folder)
    if cell not in content["cells"]:
        layout.SWEEP.write(folder, {**content, "cells": [*content["cells"], cell]})
