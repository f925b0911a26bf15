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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.config import Fault
from titan_hydra.core.job.config.fault import counted, shown, suggest
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import USER
from titan_hydra.core.job.run.failure import Failure
from titan_hydra.experiments.launch.attach import Interrupts
from titan_hydra.experiments.runs import rundir
from titan_hydra.experiments.runs.queue import Owner
from titan_hydra.experiments.runs.rundir import State
from titan_hydra.experiments.runs.view import RunRow, owner_of

from .keys import KubernetesCluster
from .kubectl import LIMIT, KubectlError, Namespace, ask_namespaces, namespace_of
from .manifest import NAME, SERVICE, Submission, new_token
from .rights import rights_lacking

if TYPE_CHECKING:
    from titan_hydra.experiments.launch.cell import Cell

AT_ONCE = 200  # number of cells whose Jobs one call creates
WORDS = 200  # maximum length of a schema's words about a fault
SAME_DIRECTORY = Path("name-00000000")  # stands for the directory of each run while specs are compared
PATIENCE = 3  # seconds between two questions whether a Job exists, after a call without an answer


def submission_of(cell: Cell, attempt: int, token: str, code: Path, exclude: Iterable[str] = ()) -> Submission:
    """Return the submission of an attempt of a cell. `code` is the copy of the code, from which the ranks import."""
    paths = (code, code / USER) if cell.job.train.imports else (code,)
    return Submission(
        job=cell.job, directory=cell.directory, attempt=attempt, token=token, paths=paths, exclude=tuple(exclude)
    )


def by_manifest(cells: list[Cell]) -> list[tuple[Submission, list[Cell]]]:
    """Group the cells whose manifests differ only in names; return for each group one manifest and its cells. This
    works without kubectl, and writes nothing.
    """
    groups: dict[str, tuple[Submission, list[Cell]]] = {}
    for cell in cells:
        submission = submission_of(cell, 1, "00000000", layout.CODE.of(cell.runs) / "HASH")
        # all names in a spec follow from the run's directory, so the specs of one directory differ in nothing else
        key = json.dumps(replace(submission, directory=SAME_DIRECTORY).job_spec())
        groups.setdefault(key, (submission, []))[1].append(cell)
    return list(groups.values())


def faults_of_fields(cells: list[Cell]) -> Iterable[Fault]:
    """Check the fields of cluster.pod against the schemas of the Kubernetes API, if these are installed."""
    try:
        import kubernetes_validate
    except ImportError:
        return
    version = kubernetes_validate.latest_version()
    for submission, _ in by_manifest(cells):
        try:
            if submission.cluster.pod:
                kubernetes_validate.validate(submission.manifest, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            path = ".".join(map(str, error.path)).removeprefix("spec.template.spec").lstrip(".")
            reason = f"{path}: {error.message}" if path else error.message
            legal = error.schema.get("properties", {}) if error.validator == "additionalProperties" else ()
            wrong = next(
                (name for name in submission.cluster.pod if legal and name not in legal),
                ", ".join(submission.cluster.pod),
            )
            yield Fault("cluster.pod", wrong, f"Kubernetes {version}: {shown(reason, WORDS)}", suggest(wrong, [*legal]))


def by_place(cells: list[Cell]) -> list[list[Cell]]:
    """Group cells by the namespace and the context that they name."""
    groups: dict[tuple[str | None, str | None], list[Cell]] = {}
    for cell in cells:
        cluster = cast(KubernetesCluster, cell.job.cluster)
        groups.setdefault((cluster.context, cluster.namespace), []).append(cell)
    return list(groups.values())


def faults_of_place(cells: list[Cell]) -> Iterable[Fault]:
    """Yield the reasons why these cells cannot be submitted to their namespace: kubectl's configuration does not lead to
    it, the user lacks rights in it, or the API server would refuse the Service or a Job. A right that only makes messages
    shorter gives a warning.
    """
    cluster = cast(KubernetesCluster, cells[0].job.cluster)
    where = ""
    try:
        namespace = namespace_of(cluster)
        where = f"namespace {namespace.name}, context {namespace.context}: "
        namespace.require_answer()
    except KubectlError as error:
        yield Fault("cluster.executor", "kubernetes", f"{where}{error}")
        return
    lacking = rights_lacking(namespace)
    for right in lacking:
        if not right.required:
            print(f"warning: {where}you may not {right}: {right.without}", file=sys.stderr)
    if required := [right for right in lacking if right.required]:
        words = ", ".join(f"{right} (without it {right.without})" for right in required)
        yield Fault("cluster.executor", "kubernetes", f"{where}you may not {words}; docs/kubernetes.md has the Role")
        return
    for words in refusals(namespace, cells):
        if cluster.namespace and re.search('namespaces ".*" not found', words):
            yield Fault("cluster.namespace", cluster.namespace, words)
        else:
            yield Fault("cluster.executor", "kubernetes", f"{where}{words}")


def refusals(namespace: Namespace, cells: list[Cell]) -> list[str]:
    """Let the API server check the Service and one manifest of each shape, as if they were created, and return what it
    refuses: a Job that names a class that does not exist, or that breaks the site's policies or quotas.
    """
    submissions = [submission for submission, _ in by_manifest(cells)]
    try:
        ensure_service(namespace, "--dry-run=server")
        limit = LIMIT + len(submissions)
        namespace.call("create", "--dry-run=server", "--filename=-", text=manifests(submissions), limit=limit)
    except KubectlError as error:
        return list(dict.fromkeys(error.about(submission.name) for submission in submissions))
    return []


def manifests(submissions: list[Submission]) -> str:
    """Return the manifests as one text for kubectl."""
    return "---\n".join(submission.text for submission in submissions)


def ensure_service(namespace: Namespace, *options: str) -> None:
    """Create the Service that gives the pods of a namespace their names, unless it exists. Raises KubectlError if it cannot
    be created, or if a Service of this name is not ours.
    """
    if has_service(namespace):
        return
    try:
        namespace.call("create", *options, "--filename=-", text=json.dumps(SERVICE))
    except KubectlError as error:
        if "(AlreadyExists)" not in str(error) and (not error.uncertain or not has_service(namespace)):
            raise


def has_service(namespace: Namespace) -> bool:
    """Whether the Service exists; False also if the user may not see it. Raises KubectlError if it is not ours."""
    try:
        answer = namespace.call("get", "service", NAME, "--ignore-not-found", "--output=json")
    except KubectlError as error:
        if error.forbidden:
            return False
        raise
    if answer and json.loads(answer)["spec"].get("selector") != SERVICE["spec"]["selector"]:
        raise KubectlError(f"the Service {NAME} of this namespace selects other pods: kubectl delete service {NAME}")
    return bool(answer)


def submit_cells(start: list[tuple[Cell, State]], code: Path, interrupts: Interrupts) -> int:
    """Submit cells, which run the copy `code`, many with one call, until a cell is refused for a reason that applies to
    all. Return the exit status.
    """
    states = {cell.directory: state for cell, state in start}
    for some in by_place([cell for cell, _ in start]):
        try:
            namespace = namespace_of(cast(KubernetesCluster, some[0].job.cluster))
            ensure_service(namespace)
            owner = {
                "executor": "kubernetes",
                "job_id": None,
                "user": getpass.getuser(),
                "code": code.name,
                "cluster": namespace.context,
                "namespace": namespace.name,
                **namespace.identity(),
            }
        except KubectlError as error:
            print(error, file=sys.stderr)
            return Exit.CONFIG
        for first in range(0, len(some), AT_ONCE):
            if interrupts.received:
                return Exit.DONE
            claimed = list(claimed_attempts(some[first : first + AT_ONCE], states, code, owner))
            if claimed and (status := create(claimed, namespace)):
                return status
    return Exit.DONE


def claimed_attempts(
    cells: list[Cell], states: dict[Path, State], code: Path, owner: Owner
) -> Iterable[tuple[Submission, Path]]:
    """Claim the next attempt of each cell, and yield what is to be submitted, with the attempt's folder. A cell whose attempt
    another launcher has claimed meanwhile is left out.
    """
    for cell in cells:
        state, token = states[cell.directory], new_token()
        number, force = state.attempt + 1, cell.job.launch.force
        attempt = rundir.claim(cell.directory, number, cell.job, cell.overrides, force, **owner, token=token)
        if attempt is not None:
            yield submission_of(cell, int(attempt.name), token, code, unfit_nodes(state.failure)), attempt


def create(claimed: list[tuple[Submission, Path]], namespace: Namespace) -> int:
    """Create the Jobs of claimed attempts with one call, and record their names. Return the exit status."""
    for submission, _ in claimed:
        write_text(layout.JOB_FILE.of(submission.directory), submission.text)
    text, limit = manifests([submission for submission, _ in claimed]), LIMIT + len(claimed)
    failed = None
    try:
        created = namespace.call("create", "--filename=-", "--output=name", text=text, limit=limit).split()
    except KubectlError as error:  # kubectl goes on with the other objects after an error
        created, failed = error.output.split(), error
    rest = []
    for submission, attempt in claimed:
        if f"job.batch/{submission.name}" in created:
            rundir.note(attempt, job_id=submission.name)
        else:
            rest.append((submission, attempt))
    return after_error(rest, failed or KubectlError("kubectl: it created no such Job")) if rest else Exit.DONE


def after_error(rest: list[tuple[Submission, Path]], error: KubectlError) -> int:
    """Find out which of these Jobs exist although kubectl failed, for example by a time-out. For the others, record why
    they were refused. If kubectl gives no answer, their attempts stay open, and the next command asks again. Return the
    exit status.
    """
    errors = {submission.name: KubectlError(error.about(submission.name)) for submission, _ in rest}
    for pause in (0, PATIENCE) if any(submission.uncertain for submission in errors.values()) else (0,):
        time.sleep(pause)
        queue = ask_namespaces([layout.CLAIM.read(attempt) for _, attempt in rest])
        for submission, attempt in rest:
            if submission.token in queue.jobs:
                rundir.note(attempt, job_id=submission.name)
                print(
                    f"{submission.directory.name}: the Job exists, although kubectl reported an error: "
                    f"{errors[submission.name]}",
                    file=sys.stderr,
                )
        rest = [(submission, attempt) for submission, attempt in rest if submission.token not in queue.jobs]
        if not rest:
            return Exit.DONE
    for submission, attempt in rest:
        reason = str(errors[submission.name])
        if errors[submission.name].uncertain and not queue.answers:
            reason = f"it is not known whether the Job exists; the same command asks again. kubectl reported an error: {reason}"
        else:
            rundir.note(attempt, ended=time.time(), refused=reason)
            reason = f"refused: {reason}"
        print(f"{submission.directory.name}: {reason}", file=sys.stderr)
    return Exit.BUG


def delete_jobs(namespace: Namespace, rows: list[RunRow]) -> Iterable[str]:
    """Delete the Jobs of runs of a namespace with one call. Yield a line for each that could not be deleted."""
    attempts = {
        owner_of(row)["job_id"] or row.state.job.id: layout.ATTEMPT.of(row.directory, row.state.attempt) for row in rows
    }
    marked = [attempt for attempt in attempts.values() if not layout.CANCELLED.of(attempt).exists()]
    for attempt in attempts.values():
        rundir.mark_cancelled(attempt)
    options = ("--wait=false", "--cascade=background", "--ignore-not-found", "--output=name")
    try:
        deleted = namespace.call("delete", "job", *attempts, *options).split()
    except KubectlError as error:
        for attempt in () if error.uncertain else marked:
            layout.CANCELLED.of(attempt).unlink(missing_ok=True)
        yield str(error)
        return
    names = [name for name in attempts if f"job.batch/{name}" in deleted]
    if names:
        print(f"cancelled {counted(len(names), 'cell')} ({', '.join(names[:3])}{', ...' if names[3:] else ''})")
    for name in attempts.keys() - {*names}:
        if attempts[name] in marked:  # nothing was stopped, so however the run ends, it was not this command
            layout.CANCELLED.of(attempts[name]).unlink(missing_ok=True)
        yield f"{name}: there is no such Job in the namespace {namespace.name}"


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
