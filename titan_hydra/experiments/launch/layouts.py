"""The layouts in which a run can be trained with the same result: other numbers of ranks, and other degrees."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import Fault, Job, from_dict, identity, to_dict
from titan_hydra.core.job.config.fault import counted, fault_at
from titan_hydra.core.job.config.load import known_keys
from titan_hydra.core.job.config.relayout import KEYS, SECTIONS, with_layout_of
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.frozen import frozen_job
from titan_hydra.core.job.run.run import hash_of
from titan_hydra.core.job.run.stretches import layout_in_words, values_of_layout
from titan_hydra.experiments.compose.change import change
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan import predict
from titan_hydra.experiments.plan.search import search
from titan_hydra.experiments.plan.shape import NotPredictable

# this entry of `elastic` stands for the planner's layouts, one for each number of nodes that no listed layout has
AUTO = "auto"


def relaid(job: Job, values: Sequence[str]) -> Job:
    """Return a frozen job in another layout. `values` are overrides: of options and keys of SECTIONS, of the keys in
    KEYS, and of keys outside the identity. The global batch does not change. If no data-parallel degree is given, the
    degree is `gpus` divided by the other degrees.

    Raises ConfigError for any other key, and for a wrong value.
    """
    new, typed = job, {value.partition("=")[0] for value in values}
    for option in (value for value in values if value.partition("=")[0] in SECTIONS):
        name = option.partition("=")[0]
        new = dataclasses.replace(new, **{name: getattr(compose_unchecked(option), name)})
    allowed = [*KEYS, *(key for key in known_keys() if key.split(".")[0] in SECTIONS)]
    new = change(new, [value for value in values if value.partition("=")[0] not in SECTIONS], experiment=allowed)
    if not typed & {"parallelism", "parallelism.dp_shard", "parallelism.dp_replicate"}:
        free = "dp_shard" if new.parallelism.dp_shard > 1 or new.parallelism.dp_replicate == 1 else "dp_replicate"
        setattr(new.parallelism, free, -1)
    if "gpus" not in typed and -1 not in (new.parallelism.dp_shard, new.parallelism.dp_replicate):
        new.gpus = None  # `freeze` sets it to the product of the degrees
    return freeze(new)


def with_one_layout(job: Job) -> Job:
    """Return a job without `elastic`, and without the keys of its cluster that apply only to elastic jobs."""
    of_executor = {name: None for name in ("nodes_min", "grow_minutes") if hasattr(job.cluster, name)}
    return dataclasses.replace(job, elastic=[], cluster=dataclasses.replace(job.cluster, **of_executor))


def in_words(job: Job) -> str:
    """Return a layout in words: parallelism=fsdp_tp on 4 ranks (dp_shard 2, tp 2), local batch 8."""
    return layout_in_words(values_of_layout(job))


def nodes_of(job: Job) -> int:
    """Return the number of nodes on which a job without replica groups runs."""
    return math.ceil(job.gpus / (job.cluster.gpus_per_node or job.gpus))


def checked_layouts(job: Job) -> tuple[tuple[Job, ...], list[Fault]]:
    """Return the layouts of an elastic job, including its own layout, and the faults of the job or of its layouts. A
    job that is not elastic has no layouts. Each layout is a complete job that has passed the checks. They are sorted
    from the most nodes to the fewest, and each has another number of nodes.
    """
    if (faults := check(job)) or not job.elastic:
        return (), faults
    by_nodes = {nodes_of(job): job}
    for overrides in (overrides for overrides in job.elastic if overrides != AUTO):
        try:
            layout_job = relaid(job, overrides.split())
        except ConfigError as error:
            faults.append(Fault("elastic", overrides, "; ".join(str(error).splitlines())))
            continue
        if not_a_layout := {word.partition("=")[0].partition(".")[0] for word in overrides.split()} - {
            "gpus",
            "data",
            *SECTIONS,
        }:
            faults.append(Fault("elastic", overrides, f"{sorted(not_a_layout)[0]} is no part of a layout"))
        elif faults_here := check(layout_job):
            faults += [Fault("elastic", overrides, str(fault)) for fault in faults_here]
        elif (nodes := nodes_of(layout_job)) in by_nodes:
            faults.append(
                Fault("elastic", overrides, f"the layout {in_words(by_nodes[nodes])} has {counted(nodes, 'node')} too")
            )
        else:
            by_nodes[nodes] = layout_job
    if AUTO in job.elastic and not faults:
        try:
            by_nodes |= {nodes_of(layout_job): layout_job for layout_job in _planned(job, set(by_nodes))}
        except NotPredictable as error:
            faults.append(Fault("elastic", AUTO, f"{error}; list the layouts instead"))
    if len(by_nodes) == 1 and not faults:
        faults.append(fault_at(job, "elastic", "gives no layout for another number of nodes"))
    return tuple(by_nodes[nodes] for nodes in sorted(by_nodes, reverse=True)), faults


def _planned(job: Job, known: set[int]) -> Iterator[Job]:
    """Yield the layout that the planner predicts to be the fastest for each number of nodes from cluster.nodes_min to
    the job's own. Numbers of nodes for which no legal layout fits are left out. Raises NotPredictable.
    """
    if predict.of_launch(job) is None or job.hardware.gpus_per_node is None:
        raise NotPredictable("the planner must know the device: hardware=NAME")
    cluster: Any = job.cluster
    for nodes in range(cluster.nodes_min or 1, nodes_of(job)):
        rows, _ = search(job, nodes * cluster.gpus_per_node) if nodes not in known else ([], 0)
        for best in [row.prediction.job for row in rows if row.prediction.fits != "no"][:1]:
            data = dataclasses.replace(job.data, local_batch=best.data.local_batch)
            sections = {name: getattr(best, name) for name in SECTIONS}
            yield freeze(dataclasses.replace(job, gpus=best.gpus, data=data, **sections))


def write_layouts(directory: Path, layouts: Sequence[Job]) -> None:
    """Write the layouts of an elastic run into its directory, a file for each number of nodes, and delete files of
    former layouts. Before that, copy the run's config.json, from which its hash was computed, to config_first.json.
    """
    keep_first(directory)
    for nodes, file in layout.LAYOUT.all(directory).items():
        if nodes not in map(nodes_of, layouts):
            file.unlink(missing_ok=True)
    for job in layouts:
        layout.LAYOUT.write(directory, to_dict(job), nodes_of(job))


def kept_layouts(directory: Path) -> tuple[Job, ...]:
    """Return the layouts that `write_layouts` wrote, from the most nodes to the fewest. Raises ConfigError for a file that
    was changed since: one that cannot be read, is for another number of nodes, fails the checks or is another experiment.
    """
    first, layouts = layout.FIRST_CONFIG.read(directory), []
    for nodes, content in sorted(layout.LAYOUT.read_all(directory).items(), reverse=True):
        file = layout.LAYOUT.of(directory, nodes)
        job = frozen_job(content, file, directory)
        try:
            same = identity(from_dict(Job, with_layout_of(content, first or content))) == hash_of(directory)
            reason = "" if same and nodes_of(job) == nodes else "it is not of this run"
            reason = reason or "; ".join(map(str, check(job)))
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it cannot be read ({error})"
        if reason:
            raise ConfigError(
                f"{file}: was changed after it was submitted: {reason}; the command line that started the run writes it anew"
            )
        layouts.append(job)
    return tuple(layouts)


def keep_first(directory: Path) -> None:
    """Keep a copy of the first attempt's configuration, from which the run's hash was computed."""
    if not layout.FIRST_CONFIG.read(directory):
        layout.FIRST_CONFIG.write(directory, layout.CONFIG.read(directory))
