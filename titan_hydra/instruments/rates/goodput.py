"""The goodput of a job whose devices fail at random: the share of its time in which it makes steps that count.

The model assumes that the time to the next failure has an exponential distribution, and that a failure may come at any
moment: while the job works, saves, or restarts. Then the mean times have a closed form (J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", 2006). tests/instruments/rates/test_goodput.py simulates the
failures. All times are in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, exp, expm1, lcm, sqrt

from titan_hydra.core.job.adapter import adapter_parameters, adapts
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.registry import states_per_parameter
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import SIZE

# number of unexpected interruptions of Llama 3's training, and the number of GPU-days in which they came (arXiv
# 2407.21783, table 5)
FAILURES = {"llama3": (419, 54 * 16384)}
# bytes per second that each device copies to the host, into pageable or pinned memory, while all devices of the host
# copy; the values are assumed
COPIED = {"async": 3e9, "async_pinned": 20e9}
LONGEST = 700.0  # largest argument of expm1(), which overflows beyond 709
GROUPS = (8, 4, 2)  # numbers of replica groups; the first that gives each group whole nodes is proposed
# seconds until the other groups go on without a group that is gone; the same value as in
# conf/fault_tolerance/torchft.yaml
WAIT = 5


@dataclass(frozen=True)
class Interruptions:
    """What costs a job time: saves, and failures. A failure comes every `between` seconds on average, and costs
    `restart` seconds until the job works again.
    """

    between: float
    restart: float
    held: float  # how many seconds training waits for a save
    behind: float = (
        0.0  # seconds from the end of this wait until the checkpoint is complete; training goes on meanwhile
    )


@dataclass(frozen=True)
class TimeShares:
    """The shares of a job's time. `redone` is the time of work that is lost in failures and done again, and of saves
    that failures interrupt. `slower` is what an elastic job loses while it has fewer nodes.
    """

    goodput: float
    saving: float
    redone: float
    restarting: float
    slower: float = 0.0


def young_interval(costs: Interruptions) -> float:
    """Return the first-order estimate of the best time between two saves (J. W. Young, 1974)."""
    return sqrt(2 * costs.held * costs.between)


def daly_interval(costs: Interruptions) -> float:
    """Return Daly's higher-order estimate of the best time between two saves. The returned time is at least the
    duration of a save in the background, as the next save waits until that save is complete.
    """
    held, between = costs.held, costs.between
    if held >= 2 * between:
        return max(between, costs.behind)
    ratio = held / (2 * between)
    return max(young_interval(costs) * (1 + sqrt(ratio) / 3 + ratio / 9) - held, costs.behind)


def shares_of_job(interval: float, costs: Interruptions) -> TimeShares:
    """Return the shares of time of a job that saves after every `interval` seconds of work, and all of whose ranks
    restart after a failure.

    From one complete checkpoint to the next, the job needs a `period` without a failure. After a failure it must do
    three things without another failure: restart, repeat the work that it did while the last complete checkpoint was
    being written (`behind`), and work through the period. If p is the probability of no failure in a period, the mean
    time of all attempts together is between * (1 - p) * exp((restart + behind + period) / between); the code uses
    Daly's form of this expression.
    """
    between, period = costs.between, max(interval, costs.behind) + costs.held
    alive = exp(-costs.restart / between)  # probability that the job is not restarting at a given moment
    again = exp(-costs.behind / between) / (between * expm1(min(period / between, LONGEST)))
    goodput, saving = alive * again * interval, alive * again * (period - interval)
    return TimeShares(goodput, saving, alive - goodput - saving, 1 - alive)


def shares_of_groups(groups: int, interval: float, costs: Interruptions, wait: float) -> TimeShares:
    """Return the shares of time of a job in `groups` replica groups. A failure restarts one group. The other groups
    wait for `wait` seconds and lose no work, as they go on from their own state.

    A group makes steps at a moment if none of its own devices has failed in the last `restart` seconds, and no device
    of another group in the last `wait` seconds. The formula neglects failures of all groups at the same time.
    """
    survives, others_survive = (
        exp(-costs.restart / (groups * costs.between)),
        exp(-wait * (groups - 1) / (groups * costs.between)),
    )
    period = max(interval, costs.behind) + costs.held
    return TimeShares(
        survives * others_survive * interval / period,
        survives * others_survive * (1 - interval / period),
        survives * (1 - others_survive),
        1 - survives,
    )


def shares_of_elastic(interval: float, costs: Interruptions, away: float, part: float) -> TimeShares:
    """Return the shares of time of an elastic job. After a failure it restarts immediately without the fraction `part`
    of its devices. `away` seconds later a replacement node is there; the job saves, and restarts once more with all
    devices.

    Nodes return as randomly as they fail. So the job is restarting if a failure or a return came in the last `restart`
    seconds. On average, `away` / `between` nodes are missing.
    """
    shares = shares_of_job(interval, replace(costs, restart=2 * costs.restart))
    slower = shares.goodput * min(part * away / costs.between, 1)
    return replace(shares, goodput=shares.goodput - slower, slower=slower)


@dataclass(frozen=True)
class Way:
    """A way to run a job: how it saves, how often (if `interval` is None, at the best interval), and what a failure
    costs.
    """

    name: str
    kind: str  # value of checkpoint.name
    interval: float | None = None
    groups: int = 1
    queue: bool = True  # whether the job waits for a node that replaces a failed one
    lost: float = 0.0  # seconds of work that a group loses when it fails
    wait: float = 0.0  # seconds that the other groups wait after a failure
    elastic: bool = False  # whether the job goes on with fewer nodes instead of waiting


@dataclass(frozen=True)
class Site:
    """A job, and the known facts of its cluster."""

    job: Job
    gpus: int  # number of devices of all replica groups
    rate: float  # failures per GPU-day
    step: float
    queue: float  # seconds until a replacement for a failed node is there
    restart: float  # seconds from the time when all nodes are there until the next step
    node_write: float  # bytes per second that a node writes
    # seconds until a checkpoint is complete; if None, computed from the checkpoint's size
    save_seconds: float | None = None
    # seconds for which training waits while a checkpoint is copied; if None, computed from the checkpoint's size
    copy_seconds: float | None = None

    @property
    def node(self) -> int:
        return self.job.cluster.gpus_per_node or 8

    @property
    def part(self) -> float:
        """The fraction of its devices that an elastic job loses with a node. The lost devices are whole nodes, and also
        whole copies of the model, each spread over its tensor-, context- and pipeline-parallel ranks.
        """
        degrees = self.job.parallelism
        return min(lcm(self.node, degrees.pp * degrees.cp * degrees.tp) / self.gpus, 1)

    @property
    def between(self) -> float:
        """The mean time between two failures."""
        return 86400 / (self.gpus * self.rate)

    @property
    def bytes(self) -> int | None:
        """The bytes of a checkpoint (weights and optimizer states); None if the number of parameters is unknown."""
        job, count = self.job, family_of(self.job.model).parameters
        states = SIZE[job.precision.param_dtype] * (1 + states_per_parameter(job.optimizer))
        return adapter_parameters(job) * states if adapts(job) else count(job.model) * states if count else None

    def save(self, groups: int = 1) -> float:
        """Return the time until a checkpoint is complete. Each replica group writes its own checkpoint."""
        if self.save_seconds is not None:
            return self.save_seconds
        return self.bytes / (self.node_write * max(self.gpus / groups / self.node, 1))

    def copy(self, kind: str, groups: int = 1) -> float:
        """Return the seconds for which training waits while a checkpoint is copied, before it is saved in the
        background.
        """
        if self.copy_seconds is not None:
            return self.copy_seconds
        return self.bytes * groups * self.job.parallelism.dp_replicate / self.gpus / COPIED[kind]

    def costs(self, way: Way) -> Interruptions:
        """Return the costs of interruptions for the job if it runs in the way `way`."""
        restart = self.restart + self.queue * (way.queue and not way.elastic) + way.lost
        if way.kind == "off":
            return Interruptions(self.between, restart, 0.0)
        save = self.save(way.groups)
        if way.kind == "sync":
            return Interruptions(self.between, restart, save)
        return Interruptions(self.between, restart, self.copy(way.kind, way.groups), save)

    def steps(self, way: Way) -> int:
        """Return the number of steps between two saves."""
        return max(
            ceil(daly_interval(self.costs(way)) / self.step)
            if way.interval is None
            else round(way.interval / self.step),
            1,
        )

    def shares(self, way: Way, steps: int | None = None) -> TimeShares:
        """Return the shares of time with `steps` steps between two saves; if None, the way determines the number."""
        interval, costs = self.step * (steps or self.steps(way)), self.costs(way)
        if way.groups > 1:
            return shares_of_groups(way.groups, interval, costs, way.wait)
        if way.elastic:
            return shares_of_elastic(interval, costs, self.queue, self.part)
        return shares_of_job(interval, costs)


def ways(at: Site) -> Iterator[Way]:
    """Yield the way in which the job's configuration runs it, then better ways; each has one improvement more than the
    way before.
    """
    saves, groups = at.job.checkpoint, at.job.fault_tolerance
    limits = [
        seconds
        for seconds in (saves.interval * at.step, 60 * (saves.interval_minutes or 0))
        if seconds and saves.name != "off"
    ]
    interval = min(limits, default=at.job.steps * at.step)
    way = Way(f"this job: checkpoint={saves.name}", saves.name, interval, elastic=bool(at.job.elastic))
    if groups.replicas > 1:
        # with torchft, the groups exchange gradients in every step, and a step in which a group fails is repeated
        often = groups.name == "torchft"
        lost, wait = at.step * (1 if often else groups.sync_every), groups.timeout_seconds + at.step * often
        yield replace(
            way, name=f"{way.name}, {groups.replicas} replica groups", groups=groups.replicas, lost=lost, wait=wait
        )
        way = replace(way, name="without replica groups")
    yield way
    kinds = ["sync" if saves.name == "off" else saves.name] + ["async_pinned"] * (saves.name != "async_pinned")
    for kind in kinds:
        yield (way := replace(way, name=f"checkpoint={kind}, best interval", kind=kind, interval=None))
    if groups.replicas == 1 and at.part < 1 and not way.elastic:
        yield replace(way, name="and elastic: fewer nodes, no queue", elastic=True)
    yield (way := replace(way, name="and spare nodes: no queue", queue=False, elastic=False))
    count = next((count for count in GROUPS if at.gpus % (count * at.node) == 0), 1)
    if groups.replicas == 1 < count:
        yield replace(way, name=f"and {count} replica groups", groups=count, lost=at.step, wait=WAIT + at.step)
