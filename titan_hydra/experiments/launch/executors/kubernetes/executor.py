"""Run cells as Jobs of a Kubernetes cluster, through kubectl: a Job for each cell, with a pod for each node."""

from __future__ import annotations

import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, cast

from titan_hydra.core.base.errors import Kind
from titan_hydra.core.job.config import Fault, Job
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.run.failure import Failure
from titan_hydra.experiments.launch.executor import Executor
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.queue import Owner, Queue
from titan_hydra.experiments.runs.rundir import State
from titan_hydra.experiments.runs.view import RunRow, owner_of

from . import kubectl, states
from .keys import KubernetesCluster
from .manifest import SERVICE, manifest_text

if TYPE_CHECKING:
    from titan_hydra.experiments.launch.attach import Interrupts
    from titan_hydra.experiments.launch.cell import Cell


class Kubernetes(Executor):
    """Creates Jobs by kubectl, and asks kubectl and the run directories for the state of a run."""

    cancels_unseen = True  # a Job's name is unique, and attempt.json has it

    def check(self, cells: list[Cell], states: list[State]) -> Iterable[Fault]:
        """Yield a fault for each reason why these cells cannot be submitted: a key applies only to other executors,
        kubectl is missing, or the API server would refuse the Jobs. A dry run works without
        kubectl.
        """
        from titan_hydra.experiments.launch.cell import to_start

        from . import submit

        if cells[0].job.launch.packed:
            yield Fault("launch.packed", True, "cells of Kubernetes are Jobs of their own", legal=(False,))
        if parallel := max(cell.job.cluster.max_parallel for cell in cells):
            yield Fault(
                "cluster.max_parallel", parallel, "Kubernetes has no such limit; a queue of Kueue has", legal=(0,)
            )
        start = to_start(cells, states)
        if cells[0].job.launch.mode == "dry":  # else the API server checks them, by its own version's schema
            yield from submit.faults_of_fields(cells)
            return
        for some in submit.by_place(start):
            yield from submit.faults_of_place(some)

    def place(self, cells: list[Cell]) -> Iterable[str]:
        """Yield the Service, and one manifest for each group of cells whose manifests differ only in names."""
        from . import submit

        yield f"\n--- the Service of the namespace, unless it exists\n{manifest_text(SERVICE)}"
        for submission, alike in submit.by_manifest(cells):
            more = f", and {counted(len(alike) - 1, 'more cell')} with other names" if len(alike) > 1 else ""
            if submission.cluster.pod and find_spec("kubernetes_validate") is None:
                yield "cluster.pod: not checked against the API's schema (pip install kubernetes-validate)"
            yield f"\n--- {alike[0].directory.name}{more}\n{submission.text}"

    def submit(self, cells: list[Cell], folder: Path | None) -> int:
        """Submit every cell that is to be started. With launch.wait, follow the cells until they have ended."""
        from titan_hydra.experiments.launch.executors.queued import submit_and_follow

        from . import submit

        def start_all(start: list[tuple[Cell, State]], _: list[State], interrupts: Interrupts) -> int:
            return submit.submit_cells(start, self.code_of(cells), interrupts)

        return submit_and_follow(cells, folder, start_all)

    def start_one(self, cell: Cell, interrupts: Interrupts) -> None:
        """Submit one cell of a search, without a table."""
        from . import submit

        submit.submit_cells([(cell, rundir.state(cell.directory))], self.code_of([cell]), interrupts)

    def ask(self, runs: list[tuple[Path, Owner]]) -> Queue:
        """Ask about the Jobs of these runs, once for each namespace."""
        return kubectl.ask_namespaces(owner for _, owner in runs if "token" in owner)

    def state(self, directory: Path, attempt: int, owner: Owner, queue: Queue) -> State:
        """Return the state of a run. If its attempt.json is damaged, use only the other files."""
        if "token" not in owner:
            return rundir.state_here(directory, attempt)
        if not isinstance(queue, kubectl.KubernetesQueue):  # `ask` was not asked about this run
            queue = kubectl.KubernetesQueue()
        return states.state_of_run(directory, attempt, owner, queue)

    def cancel(self, rows: list[RunRow], whole: bool) -> Iterable[str]:
        """Delete the Jobs of these runs, with one call for each namespace. Their ranks then save and stop."""
        from . import submit

        by_namespace: dict[kubectl.Namespace, list[RunRow]] = {}
        for row in rows:
            if row.state.job is None and not owner_of(row).get("job_id"):
                yield f"{row.cell}: is being submitted right now; try again"
            elif (row.state.host or "").startswith("cluster "):
                yield f"{row.cell}: is a Job of the {row.state.host}; cancel it there"
            else:
                by_namespace.setdefault(kubectl.Namespace.of_owner(owner_of(row)), []).append(row)
        for namespace, runs in by_namespace.items():
            yield from submit.delete_jobs(namespace, runs)

    def hint(self, job: Job, failure: Failure) -> str:
        """Return overrides of cluster keys that may prevent another failure of this kind; "" if there are none."""
        from .submit import node_of

        cluster = cast(KubernetesCluster, job.cluster)
        if failure.kind == Kind.OUT_OF_MEMORY and failure.rank is None and cluster.memory:
            number, unit = re.fullmatch(r"([0-9.]+)(.*)", cluster.memory).groups()
            return f"cluster.memory={2 * float(number):g}{unit}"
        if failure.kind == Kind.NODE and (node := node_of(failure)):
            return f"cluster.exclude=[{','.join([*cluster.exclude, node])}]"
        if failure.kind == Kind.PREEMPTED:
            return f"cluster.max_requeues={2 * cluster.max_requeues}"
        return ""
