"""The manifest of a run: an Indexed Job with a pod for each node. The pods of all runs of a namespace get their names from
one headless Service.
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import yaml

from titan_hydra.core.base.errors import Exit
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.ranks import processes
from titan_hydra.core.job.run.run import hash_of
from titan_hydra.experiments.launch.executors.queued import guarded_setup

from .keys import EFFECTS, KubernetesCluster

OWNER, RUN, TOKEN = "app.kubernetes.io/managed-by", "titan-hydra/run", "titan-hydra/token"
NAME = "titan-hydra"  # also the name of the Service
LONGEST = 63 - len(
    "-99999"
)  # a pod's host name is the Job's name and the pod's index, and a host name has at most 63 characters
FAILED_STARTS = 3  # number of pods that may fail without an exit status, as when a node has no device left for a pod
KEPT = 7 * 24 * 3600  # seconds for which an ended Job is kept, so that its pods can be looked at
# Exit statuses after which a pod is started again: it was asked to stop, or was stopped before it could handle signals.
AGAIN = (int(Exit.REQUEUED), 143)

# The first process of a container ignores every signal for which it has no handler, and Python installs its handlers
# late. So the first process is this shell, and Python is its child, which a signal can end.
SCRIPT = """\
trap 'exit {again}' TERM
{setup}{python} -u -m {module} "$@" &
child=$!
trap 'kill -TERM "$child" 2>/dev/null' TERM
wait "$child"; status=$?
while [ "$status" -gt 128 ] && kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done
exit "$status"
"""

# The Service of a namespace: it gives each pod of this package the host name POD.titan-hydra. Pods need these names before
# they are ready. A Service for each run would have to be owned by its Job, with a call for each run.
SERVICE: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Service",
    "metadata": {"name": NAME, "labels": {OWNER: NAME}},
    "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {OWNER: NAME}},
}

# The script runs in bash if the image has it, as `source` and arrays in cluster.setup need bash.
SHELL = 'shell=$(command -v bash) || shell=sh; exec "$shell" -c "$0" node "$@"'


class ManifestDumper(yaml.SafeDumper):
    """Quotes strings that kubectl's parser would otherwise not read as strings: it takes 76832e12 for a number, and y
    for true.
    """

    def represent_str(self, data: str) -> yaml.ScalarNode:
        style = "|" if "\n" in data else "'" if re.match(r"[-+.]?\d|[yYnN]$", data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


ManifestDumper.add_representer(str, ManifestDumper.represent_str)


@dataclass(frozen=True)
class PodShape:
    """How the ranks of a run are divided over pods."""

    pods: int
    ranks_per_pod: int

    @classmethod
    def of(cls, job: Job) -> PodShape:
        ranks = processes(job)
        pods = math.ceil(ranks / (job.cluster.gpus_per_node or ranks))
        return cls(pods, ranks // pods)


@dataclass(frozen=True)
class Submission:
    """An attempt of a run, in the form in which it is submitted as a Job."""

    job: Job
    directory: Path
    attempt: int
    token: str
    paths: tuple[Path, ...]  # folders from which the ranks import the code
    exclude: tuple[str, ...] = ()  # nodes to exclude, in addition to the nodes that the configuration excludes

    @property
    def cluster(self) -> KubernetesCluster:
        return cast(KubernetesCluster, self.job.cluster)

    @property
    def name(self) -> str:
        """The name of the Job. It has the run's name and hash, the attempt and the token, in
        characters that a host name may have.
        """
        end = f"-{hash_of(self.directory)}-{self.attempt}-{self.token}"
        readable = re.sub("[^a-z0-9]+", "-", self.directory.name.rpartition("-")[0].lower()).strip("-")
        readable = readable if readable[:1].isalpha() else f"run-{readable}"
        return readable[: LONGEST - len(end)].strip("-") + end

    @property
    def labels(self) -> dict[str, str]:
        return {OWNER: NAME, RUN: hash_of(self.directory), TOKEN: self.token}

    @property
    def manifest(self) -> dict[str, Any]:
        """The Job."""
        namespace = {"namespace": self.cluster.namespace} if self.cluster.namespace else {}
        queue = {"kueue.x-k8s.io/queue-name": self.cluster.queue} if self.cluster.queue else {}
        about = {"name": self.name, **namespace, "annotations": {"titan-hydra/directory": str(self.directory)}}
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {**about, "labels": self.labels | queue},
            "spec": self.job_spec(),
        }

    @property
    def text(self) -> str:
        """The manifest as YAML."""
        return manifest_text(self.manifest)

    def job_spec(self) -> dict[str, Any]:
        """Return the Job's spec. A pod that was asked to stop, or that the cluster takes away, is started again; any other
        failure of a pod fails the Job.
        """
        shape, cluster = PodShape.of(self.job), self.cluster
        rules = [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [*AGAIN]}},
            {"action": "FailJob", "onExitCodes": {"operator": "NotIn", "values": [*AGAIN]}},
        ]
        return {
            "completionMode": "Indexed",
            "completions": shape.pods,
            "parallelism": shape.pods,
            "backoffLimit": FAILED_STARTS,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": rules},
            "ttlSecondsAfterFinished": KEPT,
            **({"activeDeadlineSeconds": 60 * cluster.time_minutes} if cluster.time_minutes else {}),
            **({"suspend": True} if cluster.queue else {}),  # Kueue starts it
            "template": {"metadata": {"labels": self.labels}, "spec": self.pod_spec(shape)},
        }

    def pod_spec(self, shape: PodShape) -> dict[str, Any]:
        """Return the spec of the pods. A key that is not set adds no field to it."""
        cluster = self.cluster
        user = {"runAsUser": cluster.user, "runAsGroup": cluster.group, "fsGroup": cluster.group}
        volumes = [{"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": cluster.shared_memory}}]
        for number, claim in enumerate(cluster.volumes):
            volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        exclude = sorted({*cluster.exclude, *self.exclude})
        fields = {
            "restartPolicy": "Never",
            "subdomain": NAME,
            "terminationGracePeriodSeconds": cluster.stop_seconds,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "serviceAccountName": cluster.service_account,
            "priorityClassName": cluster.priority_class,
            "imagePullSecrets": [{"name": name} for name in cluster.image_pull_secrets],
            "nodeSelector": cluster.node_selector,
            "tolerations": [toleration(text) for text in cluster.tolerations],
            "affinity": avoiding(exclude) if exclude else None,
            "securityContext": {
                "runAsNonRoot": True,
                **{name: number for name, number in user.items() if number is not None},
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [self.container(shape)],
            "volumes": volumes,
        }
        return {name: value for name, value in fields.items() if value not in (None, [], {})} | cluster.pod

    def container(self, shape: PodShape) -> dict[str, Any]:
        """Return the only container of a pod."""
        cluster = self.cluster
        setup = "".join(f"{line}\n" for line in guarded_setup(cluster.setup))
        script = SCRIPT.format(
            again=int(Exit.REQUEUED), setup=setup, python=cluster.python, module=f"{__package__}.node"
        )
        mounts: list[dict[str, Any]] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
        for number, path in enumerate(cluster.volumes.values()):
            read_only = {"readOnly": True} if path.endswith(":ro") else {}
            mounts.append({"name": f"volume-{number}", "mountPath": path.removesuffix(":ro"), **read_only})
        kept = {"add": cluster.capabilities} if cluster.capabilities else {}
        container: dict[str, Any] = {
            "name": "ranks",
            "image": cluster.image,
            "command": ["/bin/sh", "-c", *map(unexpanded, (SHELL, script))],
            "args": [unexpanded(str(self.directory)), str(self.attempt), self.token, self.name],
            "env": self.environment(),
            "resources": self.resources(shape),
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"], **kept}},
            "terminationMessagePolicy": "FallbackToLogsOnError",
            "volumeMounts": mounts,
        }
        if cluster.secrets:
            container["envFrom"] = [{"secretRef": {"name": name}} for name in cluster.secrets]
        return container

    def environment(self) -> list[dict[str, Any]]:
        """Return the environment variables of the pods. They set HOME and USER because torch's compiler needs both, and
        a user id that the image does not list has neither.
        """
        values = {
            "HOME": "/tmp",
            "USER": NAME,
            "PYTHONPATH": ":".join(map(str, self.paths)),
            "PYTHONSAFEPATH": "1",
            **self.cluster.environment,
        }
        fields = {"POD_NAME": "metadata.name", "NODE_NAME": "spec.nodeName"}
        return [
            *({"name": name, "value": unexpanded(value)} for name, value in values.items()),
            *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        ]

    def resources(self, shape: PodShape) -> dict[str, Any]:
        """Return the resource requests and limits of a pod. Cores are requested without a limit, so that the ranks are
        never throttled.
        """
        cluster = self.cluster
        both = {name: str(value) for name, value in cluster.resources.items()}
        if cluster.gpu_resource:
            both[cluster.gpu_resource] = str(shape.ranks_per_pod)
        if cluster.memory:
            both["memory"] = cluster.memory
        cores = {"cpu": str(cluster.cpus_per_task * shape.ranks_per_pod)} if cluster.cpus_per_task else {}
        found = {"requests": cores | both, "limits": both}
        return {name: value for name, value in found.items() if value}


def manifest_text(manifest: dict[str, Any]) -> str:
    """Return a manifest as YAML."""
    return yaml.dump(manifest, Dumper=ManifestDumper, sort_keys=False, width=120)


def unexpanded(text: str) -> str:
    """Double each $ that the kubelet would otherwise read: it replaces $(NAME) by the variable's value, and $$ by $."""
    return re.sub(r"\$(?=[$(])", "$$", text)


def toleration(text: str) -> dict[str, str]:
    """Convert a taint such as KEY=VALUE:NoSchedule to the toleration of this taint."""
    taint, _, effect = text.rpartition(":") if text.endswith(EFFECTS) else (text, "", "")
    key, equals, value = taint.partition("=")
    wanted = {"key": key, "operator": "Equal", "value": value} if equals else {"key": key, "operator": "Exists"}
    return wanted | ({"effect": effect} if effect else {})


def avoiding(nodes: list[str]) -> dict[str, Any]:
    """Return the affinity that keeps pods away from nodes."""
    rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": nodes}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}


def new_token() -> str:
    """Return a token that distinguishes a submission from all others."""
    return secrets.token_hex(4)
