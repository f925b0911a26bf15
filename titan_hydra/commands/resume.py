"""`titan resume`: start another attempt of a run, on another number of GPUs or in another layout.

The run's directory, name and hash do not change, nor does anything that determines what it learns: the global batch,
the order of the data, optimizer, seed and number formats. A key that would change one of these is refused.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.config import Job
from titan_hydra.config.change import change
from titan_hydra.config.compose import compose_unchecked
from titan_hydra.config.fault import counted
from titan_hydra.config.load import known_keys
from titan_hydra.config.operation import Launch, Paths
from titan_hydra.config.relayout import KEYS, SECTIONS
from titan_hydra.config.rules.checks import check
from titan_hydra.config.user_code import edited_sources
from titan_hydra.job.freeze import freeze
from titan_hydra.job.ranks import DEGREES
from titan_hydra.launch import dispatch
from titan_hydra.launch.cell import Cell
from titan_hydra.launch.worker import load_job
from titan_hydra.runs import checkpoints, layout, rundir
from titan_hydra.runs.view import add_runs, choose_one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cell", metavar="RUN", help="a run directory, the start of its hash, or a cell's name")
    parser.add_argument(
        "values",
        nargs="*",
        metavar="KEY=VALUE",
        help="gpus=N, parallelism=OPTION, pp_schedule=OPTION, ac=OPTION, compile=OPTION, their keys, data.local_batch=N, "
        "and keys outside the hash, such as launch.mode=dry",
    )
    add_runs(parser)


def main(args: argparse.Namespace) -> int:
    """Start the attempt, and return the exit status of launch.py."""
    run = choose_one(args.cell, args.runs)
    directory = run.directory
    refuse_state(directory)
    old = load_job(directory)
    if fault := edited_sources(old.train):
        raise ConfigError(f"{directory.name}: {fault}")
    if old.fault_tolerance.name != "off":
        raise ConfigError(
            f"{directory.name}: a run with fault_tolerance={old.fault_tolerance.name} keeps its layout: the state that its replica "
            "groups share is not cut anew"
        )
    new = relaid(
        dataclasses.replace(
            old,
            launch=Launch(retry="all", require_card=old.launch.require_card),
            paths=Paths(str(args.runs.absolute())),
        ),
        args.values,
    )
    if faults := check(new):
        print(*faults, sep="\n", file=sys.stderr)
        return Exit.CONFIG
    saved = checkpoints.complete(layout.CHECKPOINTS.of(directory))
    after = f"after step {checkpoints.step_of(saved[-1])}" if saved else "from the beginning, as it has no checkpoint"
    print(f"{directory.name}: goes on {after} with {in_words(new)}; it had {in_words(old)}", flush=True)
    if new.launch.mode != "dry":
        keep_first(directory)
    return dispatch.begin([Cell(1, run.overrides, new, directory, 1)])


def relaid(job: Job, values: Sequence[str]) -> Job:
    """Return a frozen job in another layout. `values` may have options and keys of SECTIONS, the keys in KEYS, and keys
    outside the identity. The global batch does not change. If no data-parallel degree is given, it is `gpus` divided by
    the other degrees.

    Raises ConfigError for other keys and for bad values.
    """
    new, typed = job, {value.partition("=")[0] for value in values}
    for option in (value for value in values if value.partition("=")[0] in SECTIONS):
        name = option.partition("=")[0]
        new = dataclasses.replace(new, **{name: getattr(compose_unchecked(option), name)})
    allowed = [*KEYS, *(key for key in known_keys() if key.split(".")[0] in SECTIONS)]
    new = change(new, [value for value in values if value.partition("=")[0] not in SECTIONS], experiment=allowed)
    if not typed & {"parallelism", "parallelism.dp_shard", "parallelism.dp_replicate"}:
        free = "dp_shard" if new.parallelism.dp_shard > 1 or new.parallelism.dp_replicate == 1 else "dp_replicate"
        setattr(new.parallelism, free, -1)
    if "gpus" not in typed and -1 not in (new.parallelism.dp_shard, new.parallelism.dp_replicate):
        new.gpus = None  # the product of the degrees
    return freeze(new)


def in_words(job: Job) -> str:
    """Return a layout in words: parallelism=fsdp_tp on 4 ranks (dp_shard 2, tp 2)."""
    degrees = ", ".join(f"{name} {degree}" for name in DEGREES if (degree := getattr(job.parallelism, name)) > 1)
    return f"parallelism={job.parallelism.name} on {counted(job.gpus, 'rank')}{f' ({degrees})' if degrees else ''}"


def refuse_state(directory: Path) -> None:
    """Raise ConfigError if a run is done, or may be running."""
    state = rundir.state(directory)
    if state.kind == "done":
        raise ConfigError(f"{directory.name} is done; titan extend {directory.name} steps=N trains it longer")
    if state.active:
        raise ConfigError(f"{directory.name} is {state.kind}; stop it first (titan cancel {directory.name})")


def keep_first(directory: Path) -> None:
    """Keep a copy of the first attempt's configuration, as the run's hash was computed from its layout."""
    if not layout.FIRST_CONFIG.read(directory):
        layout.FIRST_CONFIG.write(directory, layout.CONFIG.read(directory))
