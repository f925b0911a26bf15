"""What launch.py does: compose every cell of its command line with Hydra, then check, place and start them together."""

import contextlib
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from titan_hydra.core.base.errors import ConfigError, RunError, denied, require_folder
from titan_hydra.core.base.private import composing_once
from titan_hydra.core.base.text import all_printed, not_printed, ready_to_print, unprintable
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.core.job.config.files import CONF, default_options, load_yaml
from titan_hydra.core.job.config.registry import SEARCHES, resolve
from titan_hydra.core.job.inputs import look_anew
from titan_hydra.experiments.compose import folders
from titan_hydra.experiments.compose.arguments import arranged
from titan_hydra.experiments.compose.cells import Question
from titan_hydra.experiments.compose.compose import register_schema
from titan_hydra.experiments.compose.describe import help_text
from titan_hydra.experiments.compose.explain import explain
from titan_hydra.experiments.compose.scan import misread
from titan_hydra.experiments.compose.sweep import Composed, expand_sweep, warn_once

from .dispatch import Begun, dispatch


@dataclass
class Line:
    """What a command line composes to."""

    cells: list[Composed] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    questions: list[Question] = field(default_factory=list)  # has one element if a search draws the cells, else none

    def compose(self) -> None:
        """Let Hydra compose the line of sys.argv. Nothing starts before all cells are checked."""

        @hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")
        def compose(config: DictConfig, overrides: list[str] | None = None, question: Question | None = None) -> None:
            """Collect a composed configuration (of each cell, with -m), or the question of a search."""
            if question:
                self.questions.append(question)
                return
            if overrides is None:  # the command line has no -m
                # to_container keeps the overrides as they were typed; reading a single one would resolve its
                # interpolations
                overrides = cast(list[str], OmegaConf.to_container(HydraConfig.get().overrides.task))
            self.cells.extend(expand_sweep(config, overrides, self.faults))

        compose()


def launch_script(script: str) -> None:
    """Run the command line, and exit with its status. A folder conf/ beside the script adds options, after those of
    --config-dir.
    """
    ready_to_print()
    try:
        sys.exit(all_printed(main(Path(script))))
    except KeyboardInterrupt:  # Ctrl-C came during composition, when nothing had started yet
        sys.exit(130)
    except BrokenPipeError:  # the program that reads this program's output, such as `head`, has closed the pipe
        sys.stderr.close()
    except OSError as error:
        if not unprintable(error):
            raise
        sys.exit(not_printed(error))


def main(script: Path | None = None, begun: Begun | None = None) -> int:
    """Run the command line, and return the exit status. The options beside `script`, if it is a project's, are found too.
    `begun` is that of `dispatch`.
    For a mistake on the command line, print one line and return 2; HYDRA_FULL_ERROR=1 shows Hydra's traceback.
    """
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(help_text([word for word in sys.argv[1:] if not word.startswith("-")]))
        return 0
    forget_earlier_line()
    line = Line()
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # without this, Hydra itself would print the error and exit with status 1
    register_schema()
    try:
        require_folder()
        typed = sys.argv[1:]
        named, sys.argv[1:] = folders.taken_out(sys.argv[1:])
        folders.set_option_folders(folders.usable_folders(named, folders.of_script(script) if script else ()))
        if not full_error:
            overrides, flags = arranged(sys.argv[1:])
            sys.argv[1:] = [*overrides, *flags]
        given = any("hydra.mode" in word for word in sys.argv[1:])
        with contextlib.nullcontext() if given else composing_once():
            line.compose()
        sys.argv[1:] = typed  # a sweep's manifest has the line as it was typed
        if line.faults:
            print(*dict.fromkeys(line.faults), sep="\n", file=sys.stderr)
            return 2
        if line.questions:
            name = str(line.questions[0].config.search.name)
            if name not in SEARCHES:
                raise bad_value("search.name", name, "not one of the choices", *SEARCHES)
            return resolve(SEARCHES[name].run)(line.questions[0])
        if searched := next((config.search.name for config, _ in line.cells if config.search.name != "off"), None):
            raise ConfigError(
                f"search={searched}: draws the values of swept keys, so it needs -m, and no file of sweeps/"
            )
        return dispatch(line.cells, begun)
    except Exception as error:
        return reported(error, bool(full_error), line.cells)
    finally:
        if not full_error:
            del os.environ["HYDRA_FULL_ERROR"]


def reported(error: Exception, full_error: bool, cells: list[Composed]) -> int:
    """Print the line of an error, and return the exit status. Raises the error if it has no line, and KeyboardInterrupt
    if the error is what Ctrl-C caused in the code that it interrupted, such as OmegaConf's.
    """
    cause: BaseException | None = error
    while cause := cause.__cause__ or cause.__context__:
        if isinstance(cause, KeyboardInterrupt):
            raise cause
    if isinstance(error, RunError):
        print(error, file=sys.stderr)
        return error.status
    if isinstance(error, PermissionError):  # for example, the runs belong to another user
        runs = Path(str(cells[0][0].paths.runs)).expanduser() if cells else Path()
        print(denied(error, "paths.runs", runs), file=sys.stderr)
        return 2
    if full_error or not (line := explain(error)):
        raise error
    print(line, file=sys.stderr)
    return 2


def forget_earlier_line() -> None:
    """Forget what an earlier command line of this process has read and printed."""
    look_anew()
    for remembered in (load_yaml, default_options, warn_once, misread):
        remembered.cache_clear()
