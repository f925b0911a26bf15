"""Import the modules of `train.imports`: what they register is known before a cell is checked, and on every rank."""
from __future__ import annotations

import importlib
import os
import sys
import traceback
from importlib.machinery import PathFinder

from .fault import Fault

KEY = "train.imports"


def load_user_modules(modules: list[str]) -> list[Fault]:
    """Import the user's modules, so that what they register is known. Returns a fault for each that cannot be imported.

    They are looked up on sys.path and then in the current folder, the folder in which launch.py was started; ranks start in the same one.
    """
    faults = []
    if modules and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    for module in modules:
        there = module in sys.modules or PathFinder.find_spec(module.partition(".")[0], sys.path)
        reason = _failure(module) if there else f"there is no module {module} on PYTHONPATH or in this folder"
        faults += [Fault(KEY, modules, reason)] if reason else []
    return faults


def _failure(module: str) -> str:
    """Import a module. Returns why that failed, with the line of the user's code; "" if it did not."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "importlib" not in frame.filename]
        place = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (frames[-1].filename, frames[-1].lineno)
        advice = "; cells are checked where torch may be missing: name what needs it as 'module:name'" * ("torch" in str(error))
        return f"{module} cannot be imported: {type(error).__name__}: {error} ({place[0]}:{place[1]}){advice}"
    return ""
