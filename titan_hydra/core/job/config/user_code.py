"""Find, digest and import the modules of `train.imports`, whose sources are part of a run's identity.

The files of a module are found by reading its imports, and nothing is executed. They are the module itself and those
modules in its folder that it imports or names in a string, as in "package.module:function". If the module belongs to an
installed package, only the files of that package count; env.json records the versions of other packages.
"""

import ast
import hashlib
import importlib
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError

from .fault import Fault
from .schema import Train

KEY = "train.imports"
INSTALLED = {"site-packages", "dist-packages"}
# the form in which a record names a function that is imported later
REFERENCE = re.compile(r"([A-Za-z_][\w.]*):[A-Za-z_]\w*")


def load_user_modules(modules: list[str], key: str = KEY) -> list[Fault]:
    """Import the user's modules, so that the parts that they register are known. Return a fault for each failed import;
    `key` is where the user has named them.

    Modules are looked up on sys.path, then in the current folder. This is the folder in which launch.py was started,
    and ranks start in it too.
    """
    faults: list[Fault] = []
    if not modules:
        return faults
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    importlib.invalidate_caches()
    for module in modules:
        reason = f"{module} is not the name of a module, such as folder.file"
        if is_name(module) and module.partition(".")[0] in sys.stdlib_module_names:
            reason = f"{module} is a module of Python's own library; give yours another name"
        elif is_name(module):
            there = any(name == module for name, _, _ in _files_of(module))
            reason = _failure(module) if there else f"there is no module {module} on PYTHONPATH or in this folder"
        faults += [Fault(key, modules, reason)] if reason else []
    return faults


def require_user_modules(modules: list[str], key: str = KEY) -> None:
    """Import the user's modules, which `key` names. Raises ConfigError if a module cannot be imported."""
    if faults := load_user_modules(modules, key):
        raise ConfigError("\n".join(map(str, faults)))


def is_name(module: Any) -> bool:
    """Whether a value has the form of a module's full name."""
    return isinstance(module, str) and all(part.isidentifier() for part in module.split("."))


def _failure(module: str) -> str:
    """Import a module. Return why this failed, with the line of the user's code; "" if it succeeded."""
    try:
        importlib.import_module(module)
    except (Exception, SystemExit) as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__)[1:] if "importlib" not in frame.filename]
        outside_libraries = [frame for frame in frames if not INSTALLED & set(Path(frame.filename).parts)]
        if isinstance(error, SyntaxError):
            file, line = error.filename, error.lineno
        else:  # the innermost line outside libraries or, if there is none, the outermost line
            frame = [*frames[:1], *outside_libraries][-1]
            file, line = frame.filename, frame.lineno
        advice = "; cells are checked where torch may be missing: name what needs it as 'module:name'" * (
            "torch" in str(error)
        )
        return f"{module} cannot be imported: {type(error).__name__}: {error} ({file}:{line}){advice}"
    return ""


def sources(modules: Iterable[str]) -> dict[str, Path]:
    """Return the files of these modules and of the modules that they import from the same folder, by path relative to
    that folder, in alphabetical order.
    """
    importlib.invalidate_caches()
    files: dict[str, Path] = {}
    waiting: list[tuple[str, tuple[str, Path] | None]] = [(module, None) for module in modules if is_name(module)]
    seen = set(waiting)
    while waiting:
        module, scope = waiting.pop()
        for name, root, file in _files_of(module):
            if scope and not _belongs(name, root, *scope):
                break
            path = file.relative_to(root).as_posix()
            if path not in files:
                files[path] = file
                new = {(other, scope or (name.partition(".")[0], root)) for other in _named_in(file, name)} - seen
                seen |= new
                waiting += new
    return dict(sorted(files.items()))


def digest(modules: Iterable[str]) -> str:
    """Return 16 hex digits of the sha256 over the paths and contents of `sources`."""
    return digest_of_code({path: file.resolve() for path, file in sources(modules).items()})


def digest_of_code(code: dict[str, Path]) -> str:
    """Return 16 hex digits of the sha256 over names and contents, in the order of names; for a link, over its
    target.
    """
    total = hashlib.sha256()
    for name, path in sorted(code.items()):
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        total.update(os.fsencode(f"{name}\0{len(content)}\0") + content)
    return total.hexdigest()[:16]


def folders(modules: Iterable[str]) -> list[str]:
    """Return the folders in which these modules are found, for the PYTHONPATH of ranks."""
    return list(dict.fromkeys(str(root) for module in modules for _, root, _ in _files_of(module)))


def edited_sources(train: Train) -> Fault | None:
    """Return a fault if the sources of a job's modules have changed since `freeze` recorded their digest; None if not, or
    if there is no record.
    """
    if train.sources is None or (now := digest(train.imports)) == train.sources:
        return None
    edited = f"the modules of train.imports are {now} now: they were edited since, and the same command line starts a new run"
    return Fault(
        "train.sources",
        train.sources,
        edited if train.imports else "launch.py fills it in where train.imports names modules",
    )


def _files_of(module: str) -> Iterator[tuple[str, Path, Path]]:
    """Yield full name, root folder and file of each package around a module, then of the module itself. Stop at the
    first one that does not exist.
    """
    path, name = [*sys.path, os.getcwd()], ""
    for depth, part in enumerate(module.split(".")):
        spec = PathFinder.find_spec(part, path)
        if spec is None and not name:  # an editable installation can have its own finder
            spec = next((spec for finder in sys.meta_path if (spec := finder.find_spec(part, None))), None)
        if spec is None:
            return
        name, path = f"{name}.{part}".lstrip("."), list(spec.submodule_search_locations or ())
        if spec.has_location:
            file = Path(spec.origin)
            yield name, file.parents[depth + bool(path)], file


def _belongs(name: str, root: Path, package: str, home: Path) -> bool:
    """Whether a module that the user's code names is part of that code: it belongs to the same installed package or,
    without such a package, is in the same folder.
    """
    top = name.partition(".")[0]
    if top == package:
        return True
    installed = home.name in INSTALLED or str(home) == sysconfig.get_paths()["stdlib"]
    return root == home and not installed and top not in sys.stdlib_module_names and top != "titan_hydra"


def _named_in(file: Path, module: str) -> set[str]:
    """Return the full names that a source file imports or refers to, whether or not they are modules; nothing if the
    file is not Python.
    """
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return set()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names if alias.name != "*")}
        elif (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and (match := REFERENCE.fullmatch(node.value))
        ):
            names.add(match[1])
    return {name for name in names if is_name(name)}
