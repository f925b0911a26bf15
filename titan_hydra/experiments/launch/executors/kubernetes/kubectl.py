"""Call kubectl: create and delete Jobs, and read the states of all Jobs and pods of a namespace with one call."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from titan_hydra.experiments.runs.queue import Owner, Queue, QueuedJob

from .keys import KubernetesCluster
from .manifest import NAME, OWNER, TOKEN

LIMIT = 60  # maximum seconds of one call of kubectl
REQUEST = "20s"  # time-out of each request that kubectl sends
# errors by which the API server refuses a request, or by which kubectl sends none; after any other error it is unknown
# whether the request was carried out
REFUSED = (
    r"\((Forbidden|Invalid|NotFound|AlreadyExists|Unauthorized|BadRequest|Conflict|MethodNotAllowed|TooManyRequests|Gone"
    r"|NotAcceptable|UnsupportedMediaType|RequestEntityTooLarge)\)"
    r"|there is no kubectl|no configuration|context .* does not exist|does not match the namespace|created no such Job"
)
LIVE = ("Pending", "Running")  # phases of a pod that has not ended
# what kubectl prints around an error; the advice names a flag that nobody can pass here
NOISE = (
    r"^error: |^Error from server |error (when creating|validating) \"STDIN\": |error validating data: "
    r"|; if you choose to ignore these errors.*"
)
SYSTEM = "kube-system"  # the namespace that every cluster has, and whose uid therefore names the cluster
MESSAGE = 160  # maximum length at which a message of the cluster is cut


class KubectlError(Exception):
    """kubectl is missing or has failed. The exception's message is the text that kubectl printed, on one line; `output` is
    what it printed about the objects for which it succeeded.
    """

    output = ""

    def about(self, name: str) -> str:
        """Return the parts of the message that name an object, or the whole message if there are none."""
        parts = str(self).split("; ")
        return "; ".join(part for part in parts if f'"{name}"' in part) or str(self)

    @property
    def uncertain(self) -> bool:
        """Whether the call's outcome is unknown, as the API server has neither carried it out nor refused it."""
        return not re.search(REFUSED, str(self))

    @property
    def forbidden(self) -> bool:
        """Whether the API server has refused the call because the user may not do this."""
        return "(Forbidden)" in str(self)


@dataclass
class KubernetesQueue(Queue):
    """The Jobs of several namespaces, by name and by token. `silent` and `elsewhere` are about attempts, by token: why the
    attempt's namespace gave no answer, and the name of the cluster to which the attempt was submitted, if kubectl leads
    to another cluster. An attempt whose token is not in `asked` was claimed after the question.
    """

    asked: set[str] = field(default_factory=set)
    silent: dict[str, str] = field(default_factory=dict)
    elsewhere: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Namespace:
    """A namespace of a cluster, and the context of kubectl's configuration that leads to it. "" is kubectl's default."""

    context: str = ""
    name: str = ""

    @classmethod
    def of_owner(cls, owner: Owner) -> Namespace:
        """Return the namespace to which an attempt was submitted, as attempt.json names it."""
        return cls(owner.get("cluster", ""), owner.get("namespace", ""))

    def call(self, *arguments: str, text: str = "", limit: float = LIMIT) -> str:
        """Return the output of kubectl; `text` is its input. Raises KubectlError."""
        options = [f"--request-timeout={REQUEST}"]
        options += [f"--context={self.context}"] if self.context else []
        options += [f"--namespace={self.name}"] if self.name else []
        if shutil.which("kubectl") is None:
            raise KubectlError("there is no kubectl on this machine")
        try:
            done = subprocess.run(
                ["kubectl", *options, *arguments],
                input=text,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=limit,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise KubectlError(f"kubectl: {error}") from error
        if done.returncode:
            lines = [re.sub(NOISE, "", line) for line in done.stderr.splitlines() if not re.match(r"[EWI]\d{4} ", line)]
            message = " ".join(
                "; ".join(filter(None, dict.fromkeys(lines))).split()
            )  # each refused object has its line
            error = KubectlError(f"kubectl: {message or f'it ended with status {done.returncode}'}")
            error.output = done.stdout
            raise error
        return done.stdout

    def require_answer(self) -> None:
        """Raise KubectlError if the API server does not answer. Of every other request, kubectl first asks ten times what
        kinds of objects there are, so that a server that is down would cost a minute.
        """
        try:
            self.call("get", "--raw", "/version")
        except KubectlError as error:
            if error.uncertain:
                raise

    @property
    def server(self) -> str:
        """The address of the API server, as kubectl's configuration names it."""
        return self.call("config", "view", "--minify", "--output=jsonpath={.clusters[0].cluster.server}")

    def uid_of(self, name: str) -> str:
        """Return the uid of a namespace of this cluster; "" if there is none with this name, or it may not be read.
        Raises KubectlError if the API server does not answer.
        """
        try:
            return self.call("get", "namespace", name, "--output=jsonpath={.metadata.uid}")
        except KubectlError as error:
            if error.forbidden or "(NotFound)" in str(error):
                return ""
            raise

    def identity(self) -> dict[str, str]:
        """Return what distinguishes this cluster from others, for attempt.json. Contexts of different clusters often have
        the same name, so the name of the context does not. Raises KubectlError.
        """
        uids = ((name, uid) for name in (SYSTEM, self.name) if (uid := self.uid_of(name)))
        return {"server": self.server} | dict(zip(("uid_of", "uid"), next(uids, ()), strict=False))

    def elsewhere(self, owner: Owner) -> str:
        """Return the name of the cluster to which an attempt was submitted, if this is another cluster, else "". A uid
        decides if it can be read here; else the server's address does.
        """
        if "server" not in owner:  # the attempt was submitted by an older version
            return ""
        uid = self.uid_of(owner["uid_of"]) if "uid" in owner else ""
        same = uid == owner["uid"] if uid else self.server == owner["server"]
        return "" if same else f"{owner['cluster']} ({owner['server']})"


def namespace_of(cluster: KubernetesCluster) -> Namespace:
    """Return the namespace of a configuration. Keys that are null get their values from kubectl's own configuration.
    Raises KubectlError if there is no such context.
    """
    kubeconfig = json.loads(Namespace().call("config", "view", "--output=json"))
    name = cluster.context or kubeconfig.get("current-context", "")
    contexts = {context["name"]: context["context"] for context in kubeconfig.get("contexts") or []}
    if not name:
        raise KubectlError("kubectl: its configuration has no current context: kubectl config use-context NAME")
    if name not in contexts:
        raise KubectlError(
            f"kubectl: its configuration has no context {name}; there are {', '.join(contexts) or 'none'}"
        )
    return Namespace(name, cluster.namespace or contexts[name].get("namespace", "default"))


@dataclass(frozen=True)
class PodState:
    """What the API server reports about a pod."""

    name: str
    index: int
    phase: str
    node: str = ""
    waits: str = ""  # why the pod does not run
    exit_status: int | None = None
    reason: str = ""  # why the pod's container ended, such as OOMKilled, or why the pod failed
    message: str = ""  # the last part of the container's output
    disrupted: str = ""  # why the cluster took the pod away


@dataclass(frozen=True)
class KubernetesJob(QueuedJob):
    """A Job and its pods. `state` is Complete, Failed, Suspended, Running, Pending or Ending. Ending means that the Job
    was deleted but its pods have not ended yet.
    """

    token: str = ""
    message: str = ""
    pods: tuple[PodState, ...] = field(default=())

    @property
    def unfinished(self) -> bool:
        return not self.over

    @property
    def over(self) -> bool:
        return self.state in ("Complete", "Failed")


def ask_namespaces(owners: Iterable[Owner]) -> Queue:
    """Ask once for each namespace about all Jobs and pods of this package. Jobs are found by name and by token."""
    queue = KubernetesQueue()
    by_namespace: dict[Namespace, list[Owner]] = {}
    for owner in owners:
        by_namespace.setdefault(Namespace.of_owner(owner), []).append(owner)
        queue.asked.add(owner["token"])
    for namespace, attempts in by_namespace.items():
        try:
            namespace.require_answer()
            jobs = {name: job for job in jobs_listed(namespace) for name in (job.id, job.token)}
            clusters: dict[str, str] = {}  # by what distinguishes a cluster, as there may be a thousand attempts
            for owner in attempts:
                if owner["token"] not in jobs and "ended" not in owner:
                    known = json.dumps([owner.get(key) for key in ("server", "uid_of", "uid")])
                    if known not in clusters:
                        clusters[known] = namespace.elsewhere(owner)
                    if clusters[known]:
                        queue.elsewhere[owner["token"]] = clusters[known]
            queue.jobs |= jobs
        except (KubectlError, ValueError) as error:
            queue.answers, queue.why = False, str(error)
            queue.silent |= {owner["token"]: str(error) for owner in attempts}
    return queue


def jobs_listed(namespace: Namespace) -> Iterable[KubernetesJob]:
    """Ask for all Jobs of this package in a namespace and their pods; without the pods if the user may not list them."""
    options = (f"--selector={OWNER}={NAME}", "--output=json")
    try:
        return jobs_in(json.loads(namespace.call("get", "jobs,pods", *options))["items"])
    except KubectlError as error:
        if not error.forbidden:
            raise
        return jobs_in(json.loads(namespace.call("get", "jobs", *options))["items"], pods_known=False)


def jobs_in(items: list[dict[str, Any]], pods_known: bool = True) -> Iterable[KubernetesJob]:
    """Yield the Jobs of a listing, each with its pods. `pods_known`: whether the listing has the pods too."""
    pods: dict[str, list[PodState]] = {}
    names: dict[str, str] = {}
    for item in items:
        if item["kind"] == "Pod":
            labels = item["metadata"].get("labels", {})
            pods.setdefault(labels.get(TOKEN, ""), []).append(pod_state(item))
            names[labels.get(TOKEN, "")] = labels.get("job-name", "")
    for some in pods.values():
        some.sort(key=lambda pod: (pod.index, pod.name))
    for item in items:
        if item["kind"] == "Job":
            token = item["metadata"]["labels"].get(TOKEN, "")
            yield job_of_item(item, token, pods.pop(token, []) if pods_known else None)
    for token, some in pods.items():
        if live := [pod for pod in some if pod.phase in LIVE]:
            yield KubernetesJob(names[token], "Ending", nodes=node_names(live), token=token, pods=tuple(some))


def job_of_item(item: dict[str, Any], token: str, known: list[PodState] | None) -> KubernetesJob:
    """Read a Job, and the reason why it waits or why it ended. `known` are its pods; None: they may not be listed."""
    status, spec, pods = item.get("status", {}), item["spec"], known or []
    conditions = {
        condition["type"]: condition for condition in status.get("conditions", []) if condition.get("status") == "True"
    }
    live = [pod for pod in pods if pod.phase in LIVE]
    end = conditions.get("Failed") or conditions.get("Complete") or {}
    message = " ".join(end.get("message", "").split())
    reason = end.get("reason", "")
    if end:
        state = "Complete" if end["type"] == "Complete" else "Failed"
    elif spec.get("suspend"):
        state, queue = "Suspended", item["metadata"]["labels"].get("kueue.x-k8s.io/queue-name")
        reason = f"waits in queue {queue}" if queue else "suspended"
    else:
        running = status.get("ready", 0) if known is None else sum(pod.phase == "Running" for pod in live)
        state = "Running" if running == spec.get("completions") else "Pending"
        waits = next((pod.waits for pod in live if pod.waits), "")
        reason = (
            f"{running} of {spec.get('completions', '?')} pods run{f'; {waits}' if waits else ''}"
            if state == "Pending"
            else ""
        )
    return KubernetesJob(
        item["metadata"]["name"],
        state,
        reason,
        node_names(live),
        status.get("startTime", "") if state == "Running" else "",  # else the start of waiting
        token,
        message,
        tuple(pods),
    )


def node_names(pods: list[PodState]) -> str:
    """Return the names of the nodes of pods, joined by commas."""
    return ",".join(dict.fromkeys(pod.node for pod in pods if pod.node))


def pod_state(item: dict[str, Any]) -> PodState:
    """Read a pod, and the reason why it waits or how its container ended."""
    status, meta = item.get("status", {}), item["metadata"]
    conditions: dict[str, dict[str, Any]] = {condition["type"]: condition for condition in status.get("conditions", [])}
    container = [*status.get("containerStatuses", []), {}][0].get("state", {})
    waiting, ended = container.get("waiting", {}), container.get("terminated", {})
    waits = ""
    if waiting.get("reason") and waiting["reason"] not in ("ContainerCreating", "PodInitializing"):
        waits = f"{waiting['reason']}: {waiting.get('message', '')}"
    elif (scheduled := conditions.get("PodScheduled", {})).get("status") == "False":
        waits = f"{scheduled.get('reason', '')}: {scheduled.get('message', '')}"
    disrupted = conditions.get("DisruptionTarget", {})
    return PodState(
        name=meta["name"],
        index=int(meta.get("annotations", {}).get("batch.kubernetes.io/job-completion-index", 0)),
        phase=status.get("phase", "Pending"),
        node=item["spec"].get("nodeName", ""),
        waits=" ".join(waits.split())[:MESSAGE].rstrip(": "),
        exit_status=ended.get("exitCode"),
        reason=ended.get("reason") or status.get("reason", ""),
        message=(ended.get("message") or status.get("message", "")).strip(),
        disrupted=disrupted.get("reason", "") if disrupted.get("status") == "True" else "",
    )
