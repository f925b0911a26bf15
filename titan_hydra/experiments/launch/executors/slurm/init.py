"""What `titan cluster init` writes for this login node's SLURM cluster, found in sinfo's list of partitions with GPUs."""

import argparse
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.experiments.launch.executor import ClusterSite, SiteOption
from titan_hydra.experiments.launch.executors.devices import device_memory, hardware

from . import squeue
from .keys import SlurmCluster
from .limits import limits_of

# the partition (the default one ends with *), GRES, number of nodes, cores and MiB of a node, time limit
FIELDS = "%P|%G|%D|%c|%m|%l"
FILE = """\
# {cluster}, partition {partition}: {nodes} node{s} of {gpus} {kind} GPU{p}, as sinfo had it; see docs/slurm.md.
name: {name}
executor: slurm
partition: {partition}
account: null  # where hours are billed: sacctmgr show associations user=$USER
gpus_per_node: {gpus}
device_memory_gib: {device_memory}
cpus_per_task: {cores}
sbatch: {{mem-per-gpu: {memory}M}}
time_minutes: {minutes}
setup: []  # shell lines before the ranks start: module load, source
{hardware}"""


@dataclass(frozen=True)
class Partition:
    """The nodes of one kind in a partition."""

    name: str
    default: bool
    nodes: int  # number of nodes of this kind
    kind: str  # model of the GPUs, such as h100; "" if GRES does not name it
    gpus: int  # GPUs of one node
    cores: int  # CPU cores of one node
    memory_mib: int  # host memory of one node
    minutes: int | None  # smallest time limit of the site; None if there is none


def add_partition(group: Any) -> None:
    group.add_argument(
        "--partition",
        help="the partition (default: SLURM's default partition or, if it has no GPUs, the one with most GPUs)",
    )


def option_of_partition(args: argparse.Namespace) -> SiteOption:
    """Return the option for the chosen partition. Raises ConfigError if sinfo does not answer."""
    listing = squeue.call("sinfo", "--noheader", f"--format={FIELDS}")
    if listing is None:
        raise ConfigError(
            "sinfo does not answer: run this on a login node of the cluster, or copy conf/cluster/slurm.yaml by hand"
        )
    available = list(partitions(listing))
    chosen = choose_partition(available, args.partition)
    walls = [limit.minutes for limit in limits_of(SlurmCluster(partition=chosen.name)) if limit.minutes is not None]
    chosen = replace(chosen, minutes=min(walls, default=chosen.minutes))
    cluster = squeue.setting("ClusterName") or "mysite"
    others = ", ".join(sorted({partition.name for partition in available} - {chosen.name}))
    note = (
        f"other partitions with GPUs: {others} (--partition, or cluster.partition= for a single run)" if others else ""
    )
    return SiteOption(cluster, lambda name: file_text(chosen, name, cluster), chosen.gpus, note)


SITE = ClusterSite("sinfo", add_partition, option_of_partition)


def partitions(listing: str) -> Iterable[Partition]:
    """Parse sinfo's listing. Yield the partitions with GPUs, one entry for each kind of node."""
    for line in listing.splitlines():
        name, gres, nodes, cores, memory, limit = (part.strip() for part in line.split("|"))
        kind, gpus = gpus_of(gres)
        if gpus:
            yield Partition(
                name=name.rstrip("*"),
                default=name.endswith("*"),
                nodes=int(nodes),
                kind=kind,
                gpus=gpus,
                cores=int(cores.rstrip("+")),
                memory_mib=int(memory.rstrip("+")),
                minutes=squeue.minutes_of(limit),
            )


def gpus_of(gres: str) -> tuple[str, int]:
    """Parse the kind and the number of GPUs from a node's GRES. `gpu:h100:8(S:0-1),nvme:1` means eight h100; `gpu:8` names
    no kind.
    """
    entries = re.findall(r"(?:^|,)gpu(?::([^:,()]+))??(?::(\d+))?(?=[(,]|$)", gres)
    kinds = {kind for kind, _ in entries if kind}
    return "+".join(sorted(kinds)), sum(int(number or 1) for _, number in entries)


def choose_partition(available: list[Partition], wanted: str | None) -> Partition:
    """Return the requested partition, else the default partition, else the partition with most GPUs. If the partition
    has several kinds of nodes, return its entry for the kind with most GPUs.
    """
    if not available:
        raise ConfigError(
            "sinfo shows no partition whose nodes have GPUs (GRES gpu); copy conf/cluster/slurm.yaml by hand"
        )
    names = dict.fromkeys(partition.name for partition in available)
    if wanted and wanted not in names:
        raise ConfigError(f"--partition {wanted}: no such partition with GPUs; there are {', '.join(names)}")
    candidates = [partition for partition in available if partition.name == wanted] if wanted else available
    return max(candidates, key=lambda partition: (partition.default, partition.nodes * partition.gpus))


def file_text(partition: Partition, name: str, cluster: str) -> str:
    """Return the text of the file. The file divides a node's cores and 95 % of its memory evenly among its GPUs; its
    time limit is the smallest that the site sets.
    """
    return FILE.format(
        cluster=cluster,
        name=name,
        partition=partition.name,
        nodes=partition.nodes,
        s="" if partition.nodes == 1 else "s",
        kind=partition.kind,
        gpus=partition.gpus,
        p="" if partition.gpus == 1 else "s",
        device_memory=device_memory(partition.kind) or "null",
        cores=max(partition.cores // partition.gpus, 1),
        hardware=hardware(partition.kind),
        memory=int(0.95 * partition.memory_mib / partition.gpus),
        minutes="null" if partition.minutes is None else partition.minutes,
    ).replace("  GPU", " GPU")
