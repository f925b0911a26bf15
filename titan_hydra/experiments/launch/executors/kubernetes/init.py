"""What `titan cluster init` writes for a Kubernetes cluster. It reads the cluster's nodes with GPUs, and the volume
claims and queues of a namespace.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.experiments.launch.executor import ClusterSite, SiteOption
from titan_hydra.experiments.launch.executors.devices import device_memory, hardware

from .keys import KubernetesCluster
from .kubectl import KubectlError, Namespace, namespace_of

RESOURCES = ("nvidia.com/gpu", "amd.com/gpu")  # names of the resources by which a node offers GPUs
SHARE = 0.9  # fraction of a node's cores and memory that its pods request: the node's daemons need the rest
UNITS = {"Ki": 2**-20, "Mi": 2**-10, "Gi": 1, "Ti": 2**10, "": 2**-30}
FILE = """\
# {context}, namespace {namespace}: {nodes} node{s} of {gpus} {kind} GPU{p}, as kubectl had it; see docs/kubernetes.md.
name: {name}
executor: kubernetes
context: {context}
namespace: {namespace}
queue: {queue}  # Kueue's local queue{queues}
image: {image}  # with Python, torch and this package's dependencies
volumes: {volumes}  # CLAIM: where it is mounted; paths.runs must lie in one, at the same path on this machine{claims}
gpus_per_node: {gpus}
device_memory_gib: {device_memory}
gpu_resource: {resource}
cpus_per_task: {cores}
memory: {memory}Gi
tolerations: {tolerations}
secrets: []  # Secrets whose entries become environment variables, such as WANDB_API_KEY
{hardware}"""


@dataclass(frozen=True)
class NodeType:
    """Nodes of one kind."""

    resource: str  # name of the resource by which a pod requests a GPU
    kind: str  # model of the GPUs; "" if no label of the nodes names it
    gpus: int
    cores: int
    memory_gib: int
    taints: tuple[str, ...]


def add_context(group: Any) -> None:
    group.add_argument("--context", help="a context of kubectl's configuration (default: the current one)")
    group.add_argument("--namespace", help="the namespace of the Jobs (default: the context's namespace)")
    group.add_argument("--image", help="the container image of the pods")


def option_of_context(args: argparse.Namespace) -> SiteOption:
    """Return the option for the kind of node that has the most GPUs in the cluster. Raises ConfigError if there is
    none, or kubectl fails.
    """
    try:
        namespace = namespace_of(KubernetesCluster(context=args.context, namespace=args.namespace))
        counts = Counter(node_types(json.loads(namespace.call("get", "nodes", "--output=json"))["items"]))
    except KubectlError as error:
        raise ConfigError(f"{error}; or copy conf/cluster/kubernetes.yaml by hand") from error
    if not counts:
        raise ConfigError(
            f"no node of context {namespace.context} offers {' or '.join(RESOURCES)}; copy conf/cluster/kubernetes.yaml by hand"
        )
    chosen, nodes = max(counts.items(), key=lambda pair: pair[0].gpus * pair[1])
    others = ", ".join(
        f"{count} x {kind_of_node.gpus} {kind_of_node.kind}".rstrip()
        for kind_of_node, count in counts.items()
        if kind_of_node != chosen
    )
    note = f"other nodes with GPUs: {others} (cluster.node_selector chooses)" if others else ""
    return SiteOption(
        namespace.context, lambda name: text_of(name, namespace, chosen, nodes, args.image), chosen.gpus, note
    )


def node_types(items: list[dict[str, Any]]) -> Iterable[NodeType]:
    """Yield the kind of each node with GPUs."""
    for item in items:
        offered, labels = item["status"].get("allocatable", {}), item["metadata"].get("labels", {})
        resource = next((name for name in RESOURCES if int(offered.get(name, 0))), "")
        if resource:
            taints = [
                f"{taint['key']}{'=' + taint['value'] if taint.get('value') else ''}:{taint['effect']}"
                for taint in item["spec"].get("taints", [])
                if not taint["key"].startswith("node.kubernetes.io/")
            ]
            kind = labels.get(f"{resource}.product", labels.get("cloud.google.com/gke-accelerator", ""))
            yield NodeType(
                resource=resource,
                kind=kind,
                gpus=int(offered[resource]),
                cores=cores_of(offered["cpu"]),
                memory_gib=gib_of(offered["memory"]),
                taints=tuple(taints),
            )


def cores_of(quantity: str) -> int:
    """Return the number of whole cores in a Kubernetes quantity such as 96 or 95500m."""
    return int(quantity[:-1]) // 1000 if quantity.endswith("m") else int(quantity)


def gib_of(quantity: str) -> int:
    """Return the number of whole GiB in a Kubernetes quantity such as 2113407400Ki."""
    number, unit = re.fullmatch(r"(\d+)(\D*)", quantity).groups()
    return int(int(number) * UNITS.get(unit, 0))


def names_in(namespace: Namespace, kind: str) -> list[str]:
    """Return the names of the objects of this kind in a namespace; [] if the cluster lacks this kind, or does not show
    it.
    """
    try:
        listing = namespace.call("get", kind, "--output=jsonpath={.items[*].metadata.name}")
    except KubectlError:
        return []
    return listing.split()


def text_of(name: str, target: Namespace, node: NodeType, nodes: int, image: str | None) -> str:
    """Return the text of the file. If there is only one queue, it is used. Volume claims are only named in a comment,
    as the user must choose where to mount them.
    """
    queues, claims = names_in(target, "localqueues.kueue.x-k8s.io"), names_in(target, "persistentvolumeclaims")
    return FILE.format(
        name=name,
        context=target.context,
        namespace=target.name,
        nodes=nodes,
        s="" if nodes == 1 else "s",
        gpus=node.gpus,
        p="" if node.gpus == 1 else "s",
        kind=node.kind or "unnamed",
        queue=queues[0] if len(queues) == 1 else "null",
        queues=f"; there are {', '.join(queues)}" if len(queues) > 1 else "",
        image=image or "null",
        volumes="{}",
        claims=f"; there are {', '.join(claims)}" if claims else "",
        device_memory=device_memory(node.kind) or "null",
        resource=node.resource,
        cores=max(int(SHARE * node.cores) // node.gpus, 1),
        memory=int(SHARE * node.memory_gib),
        tolerations=json.dumps(list(node.taints)),
        hardware=hardware(node.kind),
    )


SITE = ClusterSite("kubectl", add_context, option_of_context)
