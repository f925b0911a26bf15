"""The keys of `cluster` that the executor kubernetes adds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.operation import Cluster
from titan_hydra.core.job.config.ranges import ANY, NATURAL, PATH, WORD, Interval, Text

PART = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
LABEL = Text("a name of lower-case letters, digits and -", PART, longest=63)
SUBDOMAIN = Text("a name of lower-case letters, digits, - and .", rf"{PART}(\.{PART})*", longest=253)
QUALIFIED = Text(
    "a name such as nvidia.com/gpu", r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-\w.]*[A-Za-z0-9])?", longest=317
)
QUANTITY = Text("a quantity such as 64Gi", r"[0-9]+(\.[0-9]+)?([kMGTP]|[KMGTP]i)?")
# a label's value; it may be empty
VALUE = Text("a label's value (letters, digits, -, _ and .)", r"([A-Za-z0-9]([-\w.]*[A-Za-z0-9])?)?", longest=63)
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
TAINT = Text(
    "KEY, KEY=VALUE or either with an effect, as KEY:NoSchedule", rf"[\w./-]+(=[\w.-]*)?(:({'|'.join(EFFECTS)}))?"
)
CAPABILITY = Text("a Linux capability such as IPC_LOCK, without CAP_", "(?!CAP_)[A-Z_]+")
HOST = r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:]+\])(:\d+)?"
REPOSITORY = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
IMAGE = Text(
    "an image such as registry.site/titan:1 (its repository in lower-case letters)",
    rf"({HOST}/)?{REPOSITORY}(/{REPOSITORY})*(:\w[\w.-]{{0,127}})?(@[a-z0-9]+:[0-9a-f]{{32,}})?",
    longest=1000,
)
USER = Interval(1, 2**31 - 1)


@dataclass
class KubernetesCluster(Cluster):
    context: str | None = key(
        None, "context of kubectl's configuration; null: the current context", WORD, identity=False
    )
    namespace: str | None = key(None, "namespace of the Jobs; null: that of the context", LABEL, identity=False)
    queue: str | None = key(
        None, "Kueue's local queue, which starts all pods of a Job at once; null: none", SUBDOMAIN, identity=False
    )
    image: str | None = key(
        None, "container image with Python, torch and this package's dependencies", IMAGE, identity=False
    )
    image_pull_secrets: list[str] = key(list, "Secrets with which the image is pulled", SUBDOMAIN, identity=False)
    volumes: dict[str, str] = key(
        dict,
        "persistent volume claims and where each is mounted, as {runs: /shared, data: '/data:ro'}; paths.runs must lie in one",
        PATH,
        identity=False,
    )
    secrets: list[str] = key(
        list,
        "Secrets whose entries become environment variables of the ranks, such as WANDB_API_KEY",
        SUBDOMAIN,
        identity=False,
    )
    environment: dict[str, str] = key(dict, "environment variables of the ranks", ANY, identity=False)
    gpu_resource: str | None = key(
        "nvidia.com/gpu", "resource of which a pod requests one for each rank; null: none", QUALIFIED, identity=False
    )
    cpus_per_task: int | None = key(
        None,
        "CPU cores that a pod requests for each rank; null: none are requested",
        Interval(1, 100_000),
        identity=False,
    )
    memory: str | None = key(None, "host memory of a pod; null: no request and no limit", QUANTITY, identity=False)
    shared_memory: str = key("16Gi", "size of /dev/shm, which counts as memory of the pod", QUANTITY, identity=False)
    resources: dict[str, Any] = key(
        dict, "further resources of a pod, such as {rdma/ib: 8, ephemeral-storage: 100Gi}", ANY, identity=False
    )
    node_selector: dict[str, str] = key(dict, "labels that nodes must have", ANY, identity=False)
    tolerations: list[str] = key(
        list, "taints of nodes that are tolerated, as KEY=VALUE:NoSchedule", TAINT, identity=False
    )
    exclude: list[str] = key(list, "nodes never to use", SUBDOMAIN, identity=False)
    service_account: str | None = key(
        None,
        "service account of the pods; its token is not mounted; null: the namespace's default",
        SUBDOMAIN,
        identity=False,
    )
    priority_class: str | None = key(None, "priority class of the pods", SUBDOMAIN, identity=False)
    user: int | None = key(
        None, "user id of the ranks; null: the image's user, who must not be root", USER, identity=False
    )
    group: int | None = key(
        None, "group id of the ranks and of the volumes' files; null: the image's group", USER, identity=False
    )
    capabilities: list[str] = key(
        list,
        "capabilities that the ranks keep, such as IPC_LOCK for InfiniBand; all others are dropped",
        CAPABILITY,
        identity=False,
    )
    pod: dict[str, Any] = key(
        dict,
        "further fields of the pods' spec, such as {hostNetwork: true, runtimeClassName: nvidia}, with any values",
        identity=False,
    )
    setup: list[str] = key(list, "shell lines in each pod before its ranks start", identity=False)
    python: str = key("python", "Python interpreter in the image", PATH, identity=False)
    max_requeues: int = key(
        100,
        "number of times that the pods of a run are started again after they were asked to stop or lost",
        NATURAL,
        identity=False,
    )
