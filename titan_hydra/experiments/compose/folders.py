"""The folders with options, besides the package's conf/: those of --config-dir, which may stand several times, the
project's own conf/, and those of hydra.searchpath.
"""

import contextlib
import importlib.util
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.fault import did_you_mean, suggest
from titan_hydra.core.job.config.files import CONF, home

FLAGS = ("--config-dir", "-cd")
added: list[Path] = []  # what Hydra's search path has after conf/ in this process, the first in precedence first


def set_option_folders(folders: Sequence[Path]) -> None:
    """Let Hydra find the options of these folders, in place of those that an earlier call has added."""
    from hydra.core.plugins import Plugins
    from hydra.plugins.search_path_plugin import SearchPathPlugin

    class Added(SearchPathPlugin):
        def manipulate_search_path(self, search_path: Any) -> None:
            for folder in added:
                search_path.append("command-line", f"file://{folder}")

    if not any(plugin.__name__ == Added.__name__ for plugin in Plugins.instance().discover(SearchPathPlugin)):
        Plugins.instance().register(Added)
    added[:] = folders


def project_in(folder: Path) -> list[Path]:
    """Return the conf/ of a project that `titan init` has made in this folder; none if it has none of its own."""
    conf_folder = folder / "conf"
    return (
        [conf_folder]
        if conf_folder.is_dir() and (folder / "launch.py").is_file() and not _has_every_option(conf_folder)
        else []
    )


def option_file(group: str, name: str) -> Path:
    """Return the file of an option that a command writes: in conf/ of the folder in which the user stands, never in that
    of the installed package.
    """
    return Path("conf") / group / f"{name}.yaml"


def line_that_sees(folder: Path) -> tuple[str, str]:
    """Return how a command line begins that is typed here and finds the options in a folder such as conf/cluster: the
    program, and --config-dir where it is needed.
    """
    program = "python launch.py" if Path("launch.py").is_file() else "titan run"
    is_found = folder.resolve().parent in [
        CONF.resolve(),
        *(project_folder.resolve() for project_folder in project_in(Path.cwd())),
    ]
    return program, "" if is_found else f"--config-dir {shlex.quote(str(folder.parent))} "


def of_script(script: Path) -> list[Path]:
    """Return the conf/ beside a launch.py, as `project_in` does. Raises ConfigError for the launch.py of another checkout
    than the one from which Python has imported this package.
    """
    conf_folder = script.resolve().parent / "conf"
    if conf_folder.is_dir() and _has_every_option(conf_folder) and not conf_folder.samefile(CONF):
        raise ConfigError(
            f"{script.resolve()}: runs with the package of {CONF.parent}, whose options are others; run the launch.py there, "
            "or let Python import this one's package (pip install -e ., and no python -I)"
        )
    return project_in(script.resolve().parent)


def _has_every_option(folder: Path) -> bool:
    """Whether a conf/ is the one of a checkout of this package."""
    return (folder / "config.yaml").is_file()


def usable_folders(named: Sequence[str | Path], of_project: Sequence[Path] = ()) -> list[Path]:
    """Return absolute paths of the folders that --config-dir names and of the project's, each once. Raises ConfigError
    if a folder does not exist, or is one group instead of a folder of groups.
    """
    groups = [folder.name for folder in CONF.iterdir() if folder.is_dir()]
    typed = [home(str(folder)) for folder in named]
    for folder in typed:
        if not folder.is_dir():
            near = suggest(folder.name, [path.name for path in folder.absolute().parent.glob("*/")])
            raise ConfigError(f"--config-dir {folder}: no such folder{did_you_mean(near)}")
        inside = any((folder / group).is_dir() for group in groups)
        if folder.resolve().name in groups and any(folder.glob("*.yaml")) and not inside:
            raise ConfigError(
                f"--config-dir {folder}: holds the options of one group; name the folder above it, {folder.absolute().parent}"
            )
    folders = [path.absolute() for path in (*typed, *of_project)]
    return [
        folder for number, folder in enumerate(folders) if folder.resolve() not in map(Path.resolve, folders[:number])
    ]


def taken_out(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the folders that the arguments of launch.py name, and the other arguments. Hydra's own parser takes one
    --config-dir only, and composes slowly with hydra.searchpath.
    """
    folders, others, waiting = [], [], list(arguments)
    while waiting:
        word = waiting.pop(0)
        flag, equals, value = word.partition("=")
        if flag in FLAGS and (equals or waiting):
            folders.append(value if equals else waiting.pop(0))
        elif re.match(r"\+{0,2}hydra\.searchpath=", word):
            folders += _searched(word)
        else:
            others.append(word)
    return folders, others


def _searched(override: str) -> list[str]:
    """Return the folders of an override of hydra.searchpath. Raises ConfigError if they are none."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        value = OverridesParser.create().parse_override(override).value()
    except HydraException:
        value = None
    folders = []
    for address in value if isinstance(value, list) else [value]:
        kind, _, rest = str(address).partition("://")
        package = None
        if kind == "pkg" and re.fullmatch(r"\w+([./]\w+)*", rest):
            with contextlib.suppress(ModuleNotFoundError):  # of a package around it
                package = importlib.util.find_spec(rest.replace("/", "."))
        if kind == "file" and home(rest).is_dir():
            folders.append(rest)
        elif package and package.submodule_search_locations:
            folders.append(next(iter(package.submodule_search_locations)))
        else:
            missing = {"file": f"{rest}: no such folder", "pkg": f"{rest}: no such package"}.get(kind, "")
            form = "takes a list of folders, as hydra.searchpath=[file:///FOLDER,pkg://PACKAGE]"
            raise ConfigError(f"{override}: {missing if rest and missing else form}")
    return folders
