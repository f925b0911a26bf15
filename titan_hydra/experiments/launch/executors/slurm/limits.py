"""The site's limits on one job, as scontrol and sacctmgr report them. SLURM accepts a job that exceeds these limits but
never starts it, so such a job is refused here.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_hydra.core.job.config import Fault
from titan_hydra.core.job.config.fault import counted

from . import squeue
from .keys import SlurmCluster

if TYPE_CHECKING:
    from .submit import Array


@dataclass(frozen=True)
class Limit:
    """What a partition, an association or a QOS allows a job. None means no limit."""

    source: str
    minutes: int | None
    nodes: int | None = None
    gpus: int | None = None


def limits_of(cluster: SlurmCluster) -> Iterator[Limit]:
    """Yield the limits of the partition, of its QOS, of the user's association and of the job's QOS. The limits of the
    partition and of its QOS are left out if `cluster.partition` lists several partitions.
    """
    partition = _partition(cluster.partition or os.environ.get("SBATCH_PARTITION", ""))
    qualities = [partition["QoS"]] if partition.get("QoS", "N/A") != "N/A" else []
    if partition:
        nodes = int(partition["MaxNodes"]) if partition["MaxNodes"].isdigit() else None
        yield Limit(f"partition {partition['PartitionName']}", squeue.minutes_of(partition["MaxTime"]), nodes)
    if not re.search("limits|safe|all", squeue.setting("AccountingStorageEnforce")):
        return
    account = cluster.account or os.environ.get("SBATCH_ACCOUNT", "")
    rows = _rows(
        "show",
        "user",
        getpass.getuser(),
        "withassoc",
        "format=DefaultAccount,Account,Partition,DefaultQOS,MaxWall,MaxTRES",
    )
    of_account = [
        row for row in rows if row[1] == (account or row[0]) and row[2] in ("", partition.get("PartitionName"))
    ]
    for _, name, _, quality, wall, most in sorted(of_account, key=lambda row: row[2], reverse=True)[:1]:
        qualities.append(cluster.qos or os.environ.get("SBATCH_QOS", "") or quality)
        yield Limit(f"your association with account {name}", squeue.minutes_of(wall), *_counts(most))
    for name, wall, most in _rows("show", "qos", "format=Name,MaxWall,MaxTRES"):
        if name in qualities:
            yield Limit(f"QOS {name}", squeue.minutes_of(wall), *_counts(most))


def faults(arrays: Iterable[Array]) -> Iterator[Fault]:
    """Yield a fault for each array whose job is longer or larger than its partition, association or QOS allows."""
    known: dict[str, list[Limit]] = {}
    for array in arrays:
        shape, cluster = array.shape, array.cluster
        gpus, together = (
            shape.nodes * shape.ranks_per_node,
            f"{len(array.cells)} cells in one job take " if array.packed else "",
        )
        if repr(cluster) not in known:
            known[repr(cluster)] = [*limits_of(cluster)]
        for limit in known[repr(cluster)]:
            if shape.time_minutes and limit.minutes is not None and shape.time_minutes > limit.minutes:
                most = limit.minutes // len(array.cells) if array.packed else limit.minutes
                reason = (
                    f"{together}{counted(shape.time_minutes, 'minute')}, and {limit.source} allows {limit.minutes:,}"
                )
                yield Fault("cluster.time_minutes", cluster.time_minutes, reason, legal=(most,) if most else ())
            for count, most, noun in ((shape.nodes, limit.nodes, "node"), (gpus, limit.gpus, "GPU")):
                if most is not None and count > most:
                    yield Fault("gpus", gpus, f"{counted(count, noun)} for a job, and {limit.source} allows {most:,}")


def _partition(name: str) -> dict[str, str]:
    """Return what scontrol reports about the partition `name`, or about the default partition if `name` is "". {} if there
    is no such partition.
    """
    for line in (squeue.call("scontrol", "show", "partition", "--oneliner") or "").splitlines():
        settings = dict(word.split("=", 1) for word in line.split() if "=" in word)
        if settings.get("PartitionName") == name or (not name and settings.get("Default") == "YES"):
            return settings
    return {}


def _rows(*arguments: str) -> list[list[str]]:
    """Return the rows that sacctmgr prints; [] on a cluster without accounting."""
    return [
        line.split("|")
        for line in (squeue.call("sacctmgr", "--noheader", "--parsable2", *arguments) or "").splitlines()
    ]


def _counts(tres: str) -> tuple[int | None, int | None]:
    """Return the numbers of nodes and of GPUs in a text in SLURM's TRES format, such as cpu=64,gres/gpu=8,node=2."""
    known = dict(word.split("=", 1) for word in tres.split(",") if "=" in word)
    nodes, gpus = (int(known[name]) if known.get(name, "").isdigit() else None for name in ("node", "gres/gpu"))
    return nodes, gpus
