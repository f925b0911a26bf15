"""Submit cells as Jobs: claim each cell's attempt, write the Job's manifest into the run directory, and create the Job
by kubectl.

No cell runs twice and none is lost, even if the submitter dies or kubectl gets no answer. The attempt records a token
before kubectl is called, and the name and labels of the Job contain this token. The next launcher finds the Job by the
token. The pods of a Job start no attempt with another token. So a Job that appears late, when its attempt has been
replaced, does nothing.
"""

from __future__ import annotations

import getpass
import json
import re
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from titan_hydra.base.errors import Exit
from titan_hydra.config import Fault
from titan_hydra.config.fault import counted, shown, suggest
from titan_hydra.config.files import write_text
from titan_hydra.launch.attach import Interrupts
from titan_hydra.runs import layout, rundir
from titan_hydra.runs.code import USER
from titan_hydra.runs.failure import Failure
from titan_hydra.runs.rundir import State
from titan_hydra.runs.view import RunRow, owner_of

from .keys import KubernetesCluster
from .kubectl import LIMIT, KubectlError, Namespace, ask_namespaces, namespace_of
from .manifest import Submission, new_token

if TYPE_CHECKING:
    from titan_hydra.launch.cell import Cell

KINDS = r'{.kind} {.metadata.name} {.metadata.uid}{"\n"}'  # format in which kubectl prints a line for each object that it creates
AT_ONCE = 50  # number of cells whose Jobs one call creates
WORDS = 200  # maximum length of a schema's words about a fault
PATIENCE = 3  # seconds between two questions whether a Job exists, after a call without an answer


def submission_of(cell: Cell, attempt: int, token: str, code: Path, exclude: Iterable[str] = ()) -> Submission:
    """Return the submission of an attempt of a cell. `code` is the copy of the code, from which the ranks import."""
    paths = (code, code / USER) if cell.job.train.imports else (code,)
    return Submission(cell.job, cell.directory, attempt, token, paths, tuple(exclude))


def shapes(cells: list[Cell]) -> list[tuple[Submission, list[Cell]]]:
    """Group the cells whose manifests differ only in names; return for each group one manifest and its cells. This
    works without kubectl, and writes nothing.
    """
    found: dict[str, Submission] = {}
    alike: dict[str, list[Cell]] = {}
    for cell in cells:
        one = submission_of(cell, 1, "00000000", layout.CODE.of(cell.runs) / "HASH")
        key = json.dumps(one.job_spec()).replace(one.name, "NAME").replace(str(cell.directory), "DIRECTORY")
        key = key.replace(cell.directory.name.rpartition("-")[2], "HASH")
        found.setdefault(key, one)
        alike.setdefault(key, []).append(cell)
    return [(found[key], alike[key]) for key in found]


def faults_of_fields(cells: list[Cell]) -> Iterable[Fault]:
    """Check the fields of cluster.pod against the schemas of the Kubernetes API, if these are installed."""
    try:
        import kubernetes_validate
    except ImportError:
        return
    version = kubernetes_validate.latest_version()
    for one, _ in shapes(cells):
        try:
            if one.cluster.pod:
                kubernetes_validate.validate(one.objects[1], version, strict=True)
        except kubernetes_validate.ValidationError as error:
            place = ".".join(map(str, error.path)).removeprefix("spec.template.spec").lstrip(".")
            words = f"{place}: {error.message}" if place else error.message
            legal = error.schema.get("properties", {}) if error.validator == "additionalProperties" else ()
            wrong = next((name for name in one.cluster.pod if legal and name not in legal), ", ".join(one.cluster.pod))
            yield Fault("cluster.pod", wrong, f"Kubernetes {version}: {shown(words, WORDS)}", suggest(wrong, [*legal]))


def faults_of_manifests(cells: list[Cell]) -> Iterable[Fault]:
    """Let the API server check one manifest of each shape, as if the Job were created. It refuses a Job that this user
    may not create, that names a namespace or a class that does not exist, or that breaks the site's policies or quotas.
    """
    for one, _ in shapes(cells):
        try:
            place = namespace_of(one.cluster)
            place.call("create", "--dry-run=server", "--filename=-", text=one.text)
        except KubectlError as error:
            if one.cluster.namespace and re.search('namespaces ".*" not found', str(error)):
                yield Fault("cluster.namespace", one.cluster.namespace, str(error))
            else:
                where = f"namespace {place.name}, context {place.context}"
                yield Fault("cluster.executor", "kubernetes", f"{where}: {error}")


def submit_cells(start: list[tuple[Cell, State]], code: Path, interrupts: Interrupts) -> int:
    """Submit cells, which run the copy `code`, one after another, until a cell is refused for a reason that applies to all.
    Return the exit status.
    """
    cells = [cell for cell, _ in start]
    try:
        namespace = namespace_of(cast(KubernetesCluster, cells[0].job.cluster))
        identity = namespace.identity()
    except KubectlError as error:
        print(error, file=sys.stderr)
        return Exit.CONFIG
    for first in range(0, len(start), AT_ONCE):
        if interrupts.received:
            break
        claimed: list[tuple[Submission, Path]] = []
        for cell, state in start[first : first + AT_ONCE]:
            token = new_token()
            owner = {
                "executor": "kubernetes",
                "token": token,
                "job_id": None,
                "user": getpass.getuser(),
                "code": code.name,
                "cluster": namespace.context,
                "namespace": namespace.name,
                **identity,
            }
            number = state.attempt + 1
            attempt = rundir.claim(cell.directory, number, cell.job, cell.overrides, cell.job.launch.force, **owner)
            if attempt is not None:  # None: another launcher has claimed this attempt meanwhile
                one = submission_of(cell, int(attempt.name), token, code, unfit_nodes(state.failure))
                claimed.append((one, attempt))
        if claimed and (status := create(claimed, namespace)):
            return status
    return Exit.DONE


def create(claimed: list[tuple[Submission, Path]], namespace: Namespace) -> int:
    """Create the Jobs and Services of claimed attempts with one call, and record the names of the Jobs. Return the exit
    status.
    """
    for one, _ in claimed:
        write_text(layout.JOB_FILE.of(one.directory), one.text)
    text, limit = "---\n".join(one.text for one, _ in claimed), LIMIT + len(claimed)
    failed = None
    try:
        made = namespace.call("create", "--filename=-", f"--output=jsonpath={KINDS}", text=text, limit=limit)
    except KubectlError as error:  # kubectl goes on with the other objects after an error
        made, failed = error.output, error
    uids = {words[1]: words[2] for line in made.splitlines() if (words := line.split())[:1] == ["Job"]}
    for one, attempt in claimed:
        if one.name in uids:
            rundir.note(attempt, job_id=one.name)
            own_service(one, namespace, uids[one.name])
    rest = [(one, attempt) for one, attempt in claimed if one.name not in uids]
    return after_error(rest, failed or KubectlError("kubectl: it created no such Job")) if rest else Exit.DONE


def own_service(one: Submission, namespace: Namespace, uid: str) -> None:
    """Let the Job own its Service, so that the cluster deletes the Service with the Job."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": one.name, "uid": uid}
    patch = json.dumps({"metadata": {"ownerReferences": [owner]}})
    try:
        namespace.call("patch", "service", one.name, "--type=merge", f"--patch={patch}")
    except KubectlError as error:
        print(f"{one.name}: its Service stays when the Job is deleted: {error}", file=sys.stderr)


def after_error(rest: list[tuple[Submission, Path]], error: KubectlError) -> int:
    """Find out which of these Jobs exist although kubectl failed, for example by a time-out. For the others, record why
    they were refused. If kubectl gives no answer, their attempts stay open, and the next command asks again. Return the
    exit status.
    """
    for pause in (0, PATIENCE) if error.uncertain else (0,):
        time.sleep(pause)
        queue = ask_namespaces([layout.CLAIM.read(attempt) for _, attempt in rest])
        for one, attempt in rest:
            if one.token in queue.jobs:
                rundir.note(attempt, job_id=one.name)
                print(f"{one.directory.name}: {error.about(one.name)}; the Job exists nevertheless", file=sys.stderr)
        rest = [(one, attempt) for one, attempt in rest if one.token not in queue.jobs]
        if not rest:
            return Exit.DONE
    for one, attempt in rest:
        words = error.about(one.name)
        if error.uncertain and not queue.answers:
            words += "; the Job may exist nevertheless: this command asks again"
        else:
            rundir.note(attempt, ended=time.time(), refused=words)
            words = f"refused: {words}"
        print(f"{one.directory.name}: {words}", file=sys.stderr)
    return Exit.BUG


def delete_jobs(place: Namespace, rows: list[RunRow]) -> Iterable[str]:
    """Delete the Jobs of runs of a namespace with one call. Yield a line for each that could not be deleted."""
    attempts = {
        owner_of(row)["job_id"] or row.state.job.id: layout.ATTEMPT.of(row.directory, row.state.attempt) for row in rows
    }
    for attempt in attempts.values():
        rundir.mark_cancelled(attempt)
    options = ("--wait=false", "--cascade=background", "--ignore-not-found", "--output=name")
    try:
        deleted = place.call("delete", "job", *attempts, *options).split()
    except KubectlError as error:
        for attempt in () if error.uncertain else attempts.values():
            layout.CANCELLED.of(attempt).unlink(missing_ok=True)
        yield str(error)
        return
    names = [name for name in attempts if f"job.batch/{name}" in deleted]
    if names:
        print(f"cancelled {counted(len(names), 'cell')} ({', '.join(names[:3])}{', ...' if names[3:] else ''})")
    for name in attempts.keys() - {*names}:
        yield f"{name}: there is no such Job in the namespace {place.name}"


def unfit_nodes(failure: Failure | None) -> tuple[str, ...]:
    """Return the node that a health check found unfit in the last attempt; a retry excludes this node."""
    node = node_of(failure) if failure and failure.status == Exit.UNHEALTHY and failure.rank is not None else ""
    return (node,) if node else ()


def node_of(failure: Failure) -> str:
    """Return the name of the node on which a failure happened; "" if the node is unknown. Ranks know only the name of
    their pod, so the node is looked up.
    """
    for node in layout.NODE.read_all(failure.attempt).values() if failure.attempt else ():
        if str(failure.rank) in node.get("ranks", {}) or failure.host in (node.get("host"), node.get("node")):
            return node.get("node", "")
    return ""
