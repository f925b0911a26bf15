"""`titan cluster init [NAME]`: write a file of conf/cluster for the SLURM cluster of this login node, from sinfo's list
of partitions with GPUs.
"""

import argparse
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.config.describe import option_files
from titan_hydra.config.files import CONF, write_text

from . import squeue
from .keys import SlurmCluster
from .limits import limits_of

FIELDS = "%P|%G|%D|%c|%m|%l"  # partition (* after the default one), GRES, number of nodes, a node's cores and MiB, time limit
# GiB of device memory by the GPU's name
DEVICE_MEMORY = {"h100": 80, "h200": 141, "b200": 180, "gh200": 96, "l40s": 48, "l4": 24, "mi300x": 192}
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
    nodes: int  # number of such nodes
    kind: str  # model of the GPUs, such as h100; "" if GRES does not name it
    gpus: int  # GPUs of one node
    cores: int  # CPU cores of one node
    memory_mib: int  # host memory of one node
    minutes: int | None  # smallest time limit of the site; None if there is none


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="action", required=True, metavar="init")
    init = commands.add_parser(
        "init",
        prog="titan cluster init",
        help="write conf/cluster/NAME.yaml from sinfo",
        description="Write conf/cluster/NAME.yaml from what sinfo reports about the partitions with GPUs.",
    )
    init.add_argument("name", nargs="?", help="the NAME of cluster=NAME (default: the cluster's name in SLURM)")
    init.add_argument(
        "--partition", help="a partition (default: SLURM's default partition, else the one with most GPUs)"
    )
    # conf/ of the project in the current folder, if there is one
    conf = Path("conf") if Path("conf").is_dir() else CONF
    init.add_argument(
        "--folder", type=Path, default=conf / "cluster", help="folder of the file (default: conf/cluster)"
    )
    init.add_argument("--force", action="store_true", help="replace an existing file")


def main(args: argparse.Namespace) -> int:
    """Write the file, print it, and suggest a command that tries it."""
    listing = squeue.call("sinfo", "--noheader", f"--format={FIELDS}")
    if listing is None:
        raise ConfigError(
            "sinfo does not answer: run this on a login node of the cluster, or copy conf/cluster/slurm.yaml by hand"
        )
    found = list(partitions(listing))
    chosen = choose_partition(found, args.partition)
    walls = [limit.minutes for limit in limits_of(SlurmCluster(partition=chosen.name)) if limit.minutes is not None]
    chosen = replace(chosen, minutes=min(walls, default=chosen.minutes))
    cluster = squeue.setting("ClusterName") or "mysite"
    name = args.name or re.sub(r"\W+", "_", cluster)
    if not re.fullmatch(r"\w[\w-]*", name):
        raise ConfigError(f"{name}: cannot be typed as cluster=NAME; letters, digits, _ and - can")
    file = args.folder / f"{name}.yaml"
    if file.exists() and not args.force:
        raise ConfigError(f"{file}: already exists; choose another name, or --force to replace it")
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        write_text(file, text := file_text(chosen, name, cluster))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from error
    print(f"{file}:\n\n{text}")
    others = sorted({partition.name for partition in found} - {chosen.name})
    if others:
        print(f"other partitions with GPUs: {', '.join(others)} (--partition, or cluster.partition= for a single run)")
    folder = args.folder.resolve()
    known = ((CONF / "cluster").resolve(), Path("conf/cluster").resolve())
    where = "" if folder in known else f"--config-dir {shlex.quote(str(folder.parent))} "
    print(f"look at it, then try: python launch.py {where}cluster={name} gpus={chosen.gpus} launch.mode=dry")
    return Exit.DONE


def partitions(listing: str) -> Iterable[Partition]:
    """Parse sinfo's listing. Yield the partitions with GPUs, one entry for each kind of node."""
    for line in listing.splitlines():
        name, gres, nodes, cores, memory, limit = (part.strip() for part in line.split("|"))
        kind, gpus = gpus_of(gres)
        if gpus:
            yield Partition(
                name.rstrip("*"),
                name.endswith("*"),
                int(nodes),
                kind,
                gpus,
                int(cores.rstrip("+")),
                int(memory.rstrip("+")),
                squeue.minutes_of(limit),
            )


def gpus_of(gres: str) -> tuple[str, int]:
    """Parse the kind and the number of GPUs from a node's GRES. `gpu:h100:8(S:0-1),nvme:1` means eight h100; `gpu:8` names
    no kind.
    """
    found = re.findall(r"(?:^|,)gpu(?::([^:,()]+))??(?::(\d+))?(?=[(,]|$)", gres)
    kinds = {kind for kind, _ in found if kind}
    return "+".join(sorted(kinds)), sum(int(number or 1) for _, number in found)


def device_memory(kind: str) -> int | None:
    """Return the GiB of a GPU's memory if its name implies it, as in `h100`, `nvidia_h200`, `a100_80gb`; else None."""
    if found := re.search(r"(\d+)gb", kind.lower()):
        return int(found[1])
    return next((DEVICE_MEMORY[word] for word in re.split(r"[^a-z0-9]+", kind.lower()) if word in DEVICE_MEMORY), None)


def hardware(kind: str) -> str:
    """Return YAML lines that choose the GPU's preset in conf/hardware; "" if its name implies no memory or preset."""
    if device_memory(kind) is None or re.search(r"[+.]", kind):  # several kinds of GPU, or a part of one
        return ""
    known = {file.stem for file in option_files("hardware")}
    found = next((word for word in re.split(r"[^a-z0-9]+", kind.lower()) if word in known), None)
    return f"defaults:\n  - override /hardware@_global_.hardware: {found}\n" if found else ""


def choose_partition(found: list[Partition], wanted: str | None) -> Partition:
    """Return the requested partition, else the default partition, else the partition with most GPUs. If the partition
    has several kinds of nodes, return its entry for the kind with most GPUs.
    """
    if not found:
        raise ConfigError(
            "sinfo shows no partition whose nodes have GPUs (GRES gpu); copy conf/cluster/slurm.yaml by hand"
        )
    names = dict.fromkeys(partition.name for partition in found)
    if wanted and wanted not in names:
        raise ConfigError(f"--partition {wanted}: no such partition with GPUs; there are {', '.join(names)}")
    candidates = [partition for partition in found if partition.name == wanted] if wanted else found
    return max(candidates, key=lambda partition: (partition.default, partition.nodes * partition.gpus))


def file_text(partition: Partition, name: str, cluster: str) -> str:
    """Return the text of the file. It divides a node's cores and 95 % of its memory evenly among its GPUs; the time limit
    is the smallest that the site sets.
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
