"""`titan cluster init [NAME]`: write a file of conf/cluster for the cluster that is used from this machine. `titan
cluster check NAME`: train small runs on up to two nodes of the cluster, and print what works.
"""

from __future__ import annotations

import argparse
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import table
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.job.config.registry import EXECUTORS, executor_named, resolve
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.compose.folders import line_that_sees, option_file
from titan_hydra.experiments.launch import dispatch
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.launch.executor import ClusterSite
from titan_hydra.experiments.runs import rundir, view
from titan_hydra.experiments.runs.find import RunCell
from titan_hydra.experiments.runs.rundir import State

POLL = 1  # seconds between two reads of a run's state
ENDLESS = 1_000_000  # number of steps of the run that is stopped: more than it can make


def sites() -> dict[str, ClusterSite]:
    """Return, by the executor's name, the sites of all executors that have a site."""
    return {name: resolve(kind.site) for name, kind in EXECUTORS.items() if kind.site}


def init_site_arguments(init: argparse.ArgumentParser) -> None:
    init.add_argument("name", nargs="?", help="the NAME of cluster=NAME (default: the cluster's own name)")
    known_sites = sites()
    init.add_argument(
        "--executor",
        choices=[*known_sites],
        help="the kind of cluster (default: the first kind whose programs are on this machine)",
    )
    init.add_argument(
        "--folder",
        type=Path,
        default=option_file("cluster", "NAME").parent,
        help="folder to write the file to (default: conf/cluster)",
    )
    init.add_argument("--force", action="store_true", help="replace an existing file")
    for name, site in known_sites.items():
        site.add_arguments(init.add_argument_group(f"with --executor {name}"))


def check_site_arguments(check: argparse.ArgumentParser) -> None:
    check.add_argument("name", help="the NAME of cluster=NAME")
    check.add_argument("values", nargs="*", metavar="KEY=VALUE", help="further overrides of these runs")
    check.add_argument("--config-dir", type=Path, action="append", help="a folder with options, in addition to conf/")
    view.add_runs(check)


def init_site(args: argparse.Namespace) -> int:
    """Write the file, print it, and suggest a command that tries it."""
    known_sites = sites()
    default = next((name for name, site in known_sites.items() if shutil.which(site.program)), next(iter(known_sites)))
    option = known_sites[args.executor or default].option(args)
    name = args.name or re.sub(r"\W+", "_", option.name)
    if not re.fullmatch(r"\w[\w-]*", name):
        raise ConfigError(f"{name}: cannot be typed as cluster=NAME; letters, digits, _ and - can")
    file = args.folder / f"{name}.yaml"
    if file.exists() and not args.force:
        raise ConfigError(f"{file}: already exists; choose another name, or --force to replace it")
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        write_text(file, text := option.text(name))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    print(f"{file}:\n\n{text}")
    if option.note:
        print(option.note)
    program, where = line_that_sees(args.folder)
    print(f"look at it, then try: {program} {where}cluster={name} gpus={option.gpus} launch.mode=dry")
    return Exit.DONE


def check_site(args: argparse.Namespace) -> int:
    """Train the runs one after another, and print a table. Returns 0 if all checks pass."""
    rows = list(checked(args))
    print(*table(["what", "works", "seconds", "", "run"], rows, {"seconds"}, ("", "run")), sep="\n")
    return Exit.DONE if all(row[1] == "yes" for row in rows) else Exit.BUG


def checked(args: argparse.Namespace) -> Iterator[list[str]]:
    """Run the checks, and stop after the first that fails. Yield for each check its title, whether it works, how long
    it took, the reason if it failed, and its run.
    """
    checks = (("trains on one node", 1), ("trains on two nodes", 2), ("is stopped, saves and goes on, on two nodes", 2))
    for number, (title, nodes) in enumerate(checks):
        began, steps = time.monotonic(), ENDLESS if number == 2 else 5
        cell = cell_on(args, nodes, steps)
        print(f"\n{title}: {cell.directory.name}", flush=True)
        reason = reason_of_stop(cell) if number == 2 else reason_of_run(cell)
        works = "no" if reason else "yes"
        yield [title, works, f"{time.monotonic() - began:.0f}", reason, cell.directory.name]
        if reason:
            return


def cell_on(args: argparse.Namespace, nodes: int, steps: int) -> Cell:
    """Return a cell of a tiny model that runs on `nodes` whole nodes; with 1 node, it has only one rank."""
    where = [f"cluster={args.name}", f"paths.runs={args.runs.absolute()}"]
    cluster = compose_job(*where, *args.values, "debug=tiny", "gpus=1", config_dir=args.config_dir).cluster
    if EXECUTORS[cluster.executor].here:
        raise ConfigError(f"cluster={args.name}: cluster.executor={cluster.executor} has no nodes to check")
    ranks = nodes * cluster.gpus_per_node if nodes > 1 else 1
    overrides = [
        *where,
        "debug=tiny",
        f"gpus={ranks}",
        f"steps={steps}",
        f"name=cluster_check_{args.name}",
        "checkpoint.interval=0",
        "launch.force=true",
        "launch.wait=true" if steps != ENDLESS else "launch.wait=false",
        *args.values,
    ]
    job = compose_job(*overrides, config_dir=args.config_dir)
    return Cell(1, overrides, job, rundir.directory_of(job), 1)


def reason_of_run(cell: Cell) -> str:
    """Train a run to its end. Return the reason why the run did not reach its end; "" if it did."""
    dispatch.begin([cell])
    return "" if (state := rundir.state(cell.directory)).kind == "done" else in_short(state)


def reason_of_stop(cell: Cell) -> str:
    """Start a run and cancel it during training, twice. Return the reason why it did not save and resume; "" if it did."""
    before = 0
    for _ in range(2):
        dispatch.begin([cell])
        cell.job.launch.force = False  # the second start must resume
        while (state := rundir.state(cell.directory)).active and last_step(cell, state) <= before + 1:
            time.sleep(POLL)
        if not state.active:
            return in_short(state)
        rows, _ = view.look([RunCell(cell.directory.name, cell.directory, cell.overrides)])
        if reasons := list(executor_named(cell.job.cluster.executor).cancel(rows, False)):
            return str(reasons[0])
        while (state := rundir.state(cell.directory)).active:
            time.sleep(POLL)
        newest = checkpoints.newest(layout.CHECKPOINTS.of(cell.directory))
        saved = checkpoints.step_of(newest) if newest else 0
        if state.kind != "interrupted" or saved != last_step(cell, state):
            return (
                f"{in_short(state)} after step {last_step(cell, state)}, and its newest checkpoint is of step {saved}"
            )
        before = saved
    return ""


def last_step(cell: Cell, state: State) -> int:
    """Return the last step that the newest attempt of a run has made; 0 before its first step."""
    step: int = layout.STATUS.read(layout.ATTEMPT.of(cell.directory, state.attempt)).get("step", 0)
    return step


def in_short(state: State) -> str:
    """Return a phrase for a state: its failure, or its kind."""
    return state.failure.line if state.failure else f"{state.kind} {state.refused}".strip()
