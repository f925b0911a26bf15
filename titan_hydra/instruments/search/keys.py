"""The keys of search=optuna."""

from __future__ import annotations

from dataclasses import dataclass

from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.operation import Search
from titan_hydra.core.job.config.ranges import COUNT, NATURAL, POSITIVE, Interval


@dataclass
class OptunaSearch(Search):
    trials: int = key(40, "number of trials after which a search ends", Interval(1, 100_000), identity=False)
    parallel: int = key(1, "trials that run at once", Interval(1, 1000), identity=False)
    sampler: str = key(
        "tpe",
        "what draws a trial. tpe: Optuna's tree-structured Parzen estimator, which learns from earlier trials; "
        "random; grid: every combination of listed values, in a drawn order",
        choices=("tpe", "random", "grid"),
        identity=False,
    )
    objective: str = key(
        "loss",
        "what makes a trial better. loss: a lower held-out loss at the last step; tokens_per_second: a higher rate; "
        "both: the result is every trial that no other trial beats in both",
        choices=("loss", "tokens_per_second", "both"),
        identity=False,
    )
    pruner: str = key(
        "none",
        "which trials are trained to the last step. none: all trials; halving: of the trials of a length, the best "
        "1/search.factor go on to the next length; hyperband: as halving, but some trials begin at a greater length",
        choices=("none", "halving", "hyperband"),
        identity=False,
    )
    factor: int = key(3, "ratio of two successive lengths of a trial", Interval(2, 1000), identity=False)
    first_steps: int | None = key(
        None,
        "steps of the shortest length of a trial; null: steps / factor^2, which gives three lengths",
        COUNT,
        identity=False,
    )
    budget_gpu_hours: float | None = key(
        None,
        "GPU-hours (on a CPU: rank-hours) of all trials, after which no trial starts or goes on",
        POSITIVE,
        identity=False,
    )
    confirm: int = key(
        3,
        "number of best trials that are run again with other seeds before the winner is chosen",
        NATURAL,
        identity=False,
    )
    seeds: int = key(
        3,
        "number of seeds with which each of the best trials is run, including the trial's own seed",
        Interval(1, 1000),
        identity=False,
    )
    seed: int = key(0, "seed of the values that the search draws", Interval(0, 2**31 - 1), identity=False)
