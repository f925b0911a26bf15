"""Checks of the executor's keys. They find what the API would refuse, and what would prevent the ranks from starting."""

import os
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.ranges import Text
from titan_hydra.core.job.config.schema import Job

from .keys import QUALIFIED, QUANTITY, SUBDOMAIN, VALUE, KubernetesCluster

VARIABLE = Text("the name of an environment variable (letters, digits and _)", r"[A-Za-z_][A-Za-z0-9_]*")
VARIABLES_OURS = {"POD_NAME", "NODE_NAME", "JOB_COMPLETION_INDEX"}
# paths at which a mounted volume would hide the image's system, and folders in which the container runtime mounts its own
SYSTEM = {"/", "/bin", "/sbin", "/lib", "/lib64", "/usr", "/usr/bin", "/usr/lib", "/usr/local", "/etc", "/run", "/var"}
KERNEL = ("/dev", "/proc", "/sys", "/run/secrets", "/var/run")
POWERS = ("hostNetwork", "hostPID", "hostIPC")  # fields that give a pod a part of its node
# fields of a pod's spec that the key `pod` may not set, each with the key that sets it instead
OURS = {
    "containers": "the layout",
    "subdomain": "the layout",
    "restartPolicy": "cluster.max_requeues",
    "terminationGracePeriodSeconds": "cluster.stop_seconds",
    "activeDeadlineSeconds": "cluster.time_minutes",
    "volumes": "cluster.volumes",
    "nodeSelector": "cluster.node_selector",
    "tolerations": "cluster.tolerations",
    "affinity": "cluster.exclude",
    "nodeName": "cluster.node_selector and cluster.exclude",
    "serviceAccountName": "cluster.service_account",
    "serviceAccount": "cluster.service_account",  # the older name of serviceAccountName
    "priorityClassName": "cluster.priority_class",
    "priority": "cluster.priority_class",
    "resources": "cluster.memory, cluster.cpus_per_task and cluster.resources",
    "imagePullSecrets": "cluster.image_pull_secrets",
    "securityContext": "cluster.user and cluster.group",
    "hostname": "the layout",
    "hostnameOverride": "the layout",
    "ephemeralContainers": "the layout",
    "setHostnameAsFQDN": "the layout",
}


def faults(job: Job) -> Iterator[Fault]:
    """Yield the faults in the keys of a job on Kubernetes."""
    cluster = job.cluster
    assert isinstance(cluster, KubernetesCluster)
    if not cluster.image:
        yield fault_at(job, "cluster.image", "cluster.executor=kubernetes needs it: the pods run this image")
    yield from tables_have_legal_names(cluster)
    yield from resources_are_quantities(cluster)
    yield from fields_are_the_sites(cluster)
    yield from shared_memory_fits(cluster)
    yield from runs_lie_on_a_volume(cluster, job.paths.runs)
    yield from one_pod_is_one_replica(job)


def tables_have_legal_names(cluster: KubernetesCluster) -> Iterator[Fault]:
    """The API accepts the names in tables and the values of labels."""
    tables: tuple[tuple[str, Text], ...] = (
        ("environment", VARIABLE),
        ("volumes", SUBDOMAIN),
        ("node_selector", QUALIFIED),
        ("resources", QUALIFIED),
    )
    for key, names in tables:
        for name in getattr(cluster, key):
            if reason := names.objection(str(name)):
                yield Fault(f"cluster.{key}", name, reason)
    for name in VARIABLES_OURS & cluster.environment.keys():
        yield Fault("cluster.environment", name, "the launcher sets it")
    for name, value in cluster.node_selector.items():
        if reason := VALUE.objection(value):
            yield Fault("cluster.node_selector", f"{name}: {value}", reason)


def resources_are_quantities(cluster: KubernetesCluster) -> Iterator[Fault]:
    """Each further resource has a quantity, and no other key sets the same resource."""
    from_keys = {"cpu": "cluster.cpus_per_task", "memory": "cluster.memory", cluster.gpu_resource: "the layout"}
    for name, value in cluster.resources.items():
        if name in from_keys:
            yield Fault("cluster.resources", name, f"follows from {from_keys[name]}")
        elif isinstance(value, bool) or QUANTITY.objection(str(value)):
            yield Fault("cluster.resources", f"{name}: {value}", QUANTITY.objection(str(value)) or "must be a number")


def fields_are_the_sites(cluster: KubernetesCluster) -> Iterator[Fault]:
    """The additional fields of the pod's spec (cluster.pod) are none of the fields that the launcher sets."""
    for name in cluster.pod:
        if name in OURS:
            yield Fault("cluster.pod", name, f"follows from {OURS[name]}")
        elif not re.fullmatch("[a-z][A-Za-z]*", str(name)):
            yield Fault("cluster.pod", name, "not the name of a field, as in {runtimeClassName: nvidia}")


def rights_beyond_the_level(job: Job) -> Iterator[Fault]:
    """Yield a warning for each key that gives the pods a right which Kubernetes' Pod Security level "restricted" forbids,
    or that mounts a token of the API.
    """
    cluster = job.cluster
    assert isinstance(cluster, KubernetesCluster)
    more = "the pods have more rights than Kubernetes' level restricted allows"
    for name in cluster.capabilities:
        if name != "NET_BIND_SERVICE":
            yield Fault("cluster.capabilities", name, more)
    for name in POWERS:
        if cluster.pod.get(name):
            yield Fault("cluster.pod", name, more)
    containers = cluster.pod.get("initContainers") or []
    for container in containers if isinstance(containers, list) else []:
        context = container.get("securityContext") if isinstance(container, dict) else None
        context = context if isinstance(context, dict) else {}
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            yield Fault(
                "cluster.pod", "initContainers", f"{more}, without securityContext.allowPrivilegeEscalation: false"
            )
    if cluster.pod.get("automountServiceAccountToken"):
        yield Fault("cluster.pod", "automountServiceAccountToken", "the ranks get a token of the Kubernetes API")


def shared_memory_fits(cluster: KubernetesCluster) -> Iterator[Fault]:
    """/dev/shm is a part of the pod's memory, so a rank that fills a larger one would be killed."""
    if cluster.memory and number_of(cluster.shared_memory) > number_of(cluster.memory):
        reason = f"is more than cluster.memory={cluster.memory}, of which it is a part"
        yield Fault("cluster.shared_memory", cluster.shared_memory, reason)


def number_of(quantity: str) -> float:
    """Convert a quantity such as 64Gi to a number."""
    unit = quantity.lstrip("0123456789.")
    power = "kMGTP".find(unit[:1].replace("K", "k")) + 1 if unit else 0
    return float(quantity.removesuffix(unit)) * (1024 if unit.endswith("i") else 1000) ** power


def runs_lie_on_a_volume(cluster: KubernetesCluster, folder: str) -> Iterator[Fault]:
    """Each volume is mounted at its own absolute path, and the folder of runs lies in a volume that the pods can write.
    This is checked because the run directory has the same path in the pods as on this machine.
    """
    paths = {claim: PurePosixPath(path.removesuffix(":ro")) for claim, path in cluster.volumes.items()}
    for claim, path in paths.items():
        if not path.is_absolute() or ".." in path.parts or ":" in str(path):
            yield Fault("cluster.volumes", f"{claim}: {path}", "is not an absolute path, or one with :ro behind it")
        elif list(paths.values()).count(path) > 1:
            yield Fault("cluster.volumes", f"{claim}: {path}", "another volume is mounted there")
        elif str(path) in SYSTEM or any(path.is_relative_to(folder) for folder in KERNEL):
            yield Fault(
                "cluster.volumes", f"{claim}: {path}", "would hide a folder of the image's or the node's system"
            )
    runs = PurePosixPath(os.path.abspath(os.path.expanduser(folder)))
    holders = {path: claim for claim, path in paths.items() if runs.is_relative_to(path)}
    if not holders:
        yield Fault(
            "paths.runs",
            str(runs),
            "the pods must see it at this path: mount a volume there, as +cluster.volumes.CLAIM=PATH",
        )
    elif cluster.volumes[holders[max(holders, key=lambda path: len(path.parts))]].endswith(":ro"):
        yield Fault("paths.runs", str(runs), "its volume is mounted read-only")


def one_pod_is_one_replica(job: Job) -> Iterator[Fault]:
    """A run is one Job, so it has no replica groups: each group would need its own Job."""
    if job.fault_tolerance.replicas > 1:
        yield fault_at(
            job,
            "fault_tolerance.replicas",
            "cluster.executor=kubernetes starts one Job for a run, and each replica group would need its own",
            1,
        )
