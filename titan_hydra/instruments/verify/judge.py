"""Judge a layout: compare its differences from the reference with the differences that rounding alone causes.

The fixed numbers of a `Case` are only upper bounds, as the effect of rounding depends on the processor and grows over
the steps. A difference beyond a tight tolerance is judged by a band measured on the same machine: the reference runs
again with other last bits of its initial weights and another order of its sums (`DRAWS`). Each parameter of the layout
may differ by MULTIPLE times the spread of these runs. One further difference is allowed: AdamW may have moved one
element in the opposite direction in one step (`flips`).
"""

import math
from dataclasses import dataclass
from typing import Any

import torch

from titan_hydra.core.job.config import Job

from .case import Case
from .reference import Trace

# Relative differences by column (loss, norm, gradients, weights) and parameter; loss and norm have one entry each: the
# largest difference of all steps.
Differences = dict[str, dict[str, float]]
# differences up to these values pass, and no band is measured for them
TIGHT = {
    "loss": 1e-5,
    "norm": 1e-5,
    "gradients": 1e-2,
    "weights": 1e-3,
}
# Factors by which the spread is multiplied. In layouts that differ from the reference by rounding alone, a parameter
# differed by 0.3 to 1.3 times its largest difference in the draws. Loss and norm are single numbers, so all draws may
# agree by chance; their factor is larger.
MULTIPLE = {"loss": 5.0, "norm": 5.0, "gradients": 3.0, "weights": 3.0}
# The first words of the error if ranks refuse a case; ring attention, for example, refuses a user's attention kernel.
REFUSED = "titan_hydra.core.base.errors.ConfigError: "
# The runs that measure a band: (seed of the weights' new last bits, or None to keep the old bits; local batches per
# global batch, see `whole_parts`). Most cases need one run; cases in which tokens change experts need more.
DRAWS = ((2, 4), (1, 1), (None, 2), (3, 2), (4, 1), (5, 1), (6, 4), (7, 2))
# Further runs, which are made only if a case is beyond its band by less than NEAR times. One layout of a hundred
# differs by a little more than the largest of eight draws allows; faults differ by far more.
MORE_DRAWS = tuple((seed, (4, 2, 4, 1)[seed % 4]) for seed in range(8, 24))
NEAR = 3.0


@dataclass(frozen=True, repr=False)
class Outcome:
    """How far a layout is from its reference. A difference is infinite if one of the two values is not finite."""

    case: Case
    differences: Differences
    # number of initial tensors that differ in any bit or are drawn from another distribution; after a resume, plus the
    # number of random states that are not continued
    start: int
    routing: int  # number of values that differ: experts' loads in any step, routers' biases after the last step
    drift: int  # number of shards whose copies on several ranks differ in any bit after the last step
    # number of gradients that were summed in bfloat16, or reduced in a dtype other than the configured one
    rounded: int
    # number of samples that the run has had before, or that do not begin where the previous sample of their slot ended;
    # only the float64 reference finds them
    data: int = 0
    export: int = 0  # 1 if an export, read as Hugging Face describes it, computes another loss; only `exported` cases
    doubtful: int = 0  # number of tokens, over all steps, that stand between two experts in the float64 reference
    band: float = 0.0  # largest difference as a multiple of the measured band; 0: no band was measured
    error: str = ""  # why the case failed before its end

    @property
    def loss(self) -> float:
        """The largest difference of the loss in any step."""
        return max(self.differences["loss"].values())

    @property
    def norm(self) -> float:
        """The largest difference of the gradient norm in any step."""
        return max(self.differences["norm"].values())

    @property
    def gradients(self) -> float:
        """The largest difference of a parameter's gradient at the first step."""
        return max(self.differences["gradients"].values())

    @property
    def weights(self) -> float:
        """The largest difference of a parameter's weight after the last step, relative to the weight's total change.
        The rounding of updates is subtracted.
        """
        return max(self.differences["weights"].values())

    @property
    def worst(self) -> str:
        """The names of the parameters whose gradient and whose weight differ most, or the error."""
        gradients, weights = (
            max(self.differences[column].items(), key=lambda item: item[1])[0] for column in ("gradients", "weights")
        )
        return self.error or f"gradient of {gradients}, weight {weights}"

    @property
    def passed(self) -> bool:
        """Whether all differences are within the case's bounds and the band, and all `counts` are 0."""
        return all(times <= 1 for times in self.times.values()) and not self.counts

    @property
    def times(self) -> dict[str, float]:
        """For each column, the largest difference as a multiple of the case's bound. The entry `band` is the outcome's
        field `band`.
        """
        case = self.case
        bounds = {"loss": case.loss, "norm": case.norm, "gradient": case.gradients, "weight": case.weights}
        differences = dict(zip(bounds, (self.loss, self.norm, self.gradients, self.weights), strict=True))
        return {column: differences[column] / bound for column, bound in bounds.items()} | {"band": self.band}

    @property
    def counts(self) -> dict[str, int]:
        """The counts of errors that are not 0, by column."""
        all_counts = {
            "start": self.start,
            "routing": self.routing * self.case.routing,
            "copies": self.drift,
            "rounded": self.rounded,
            "data": self.data,
            "export": self.export,
        }
        return {column: number for column, number in all_counts.items() if number}

    @property
    def unsure(self) -> bool:
        """Whether the case has failed, but rounding alone may be the cause: all differences are too large by less than
        NEAR times, or a token stood between two experts.
        """
        if self.passed or self.error or self.counts.keys() - {"routing"}:
            return False
        return bool(self.doubtful) or (not self.counts and max(self.times.values()) < NEAR)

    def __repr__(self) -> str:
        case = self.case
        return (
            f"{case.name}: loss {self.loss:.1e} of {case.loss}, norm {self.norm:.1e} of {case.norm}, gradients {self.gradients:.1e} of "
            f"{case.gradients}, weights {self.weights:.1e} of {case.weights}, {self.band:.2g} of the measured band; worst are "
            f"{self.worst}; start {self.start}, routing {self.routing}, copies {self.drift}, rounded {self.rounded}, "
            f"data {self.data}, export {self.export}; its job: {' '.join((*case.overrides, *case.base))}"
        )


def outcome_as_json(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as JSON values; a difference that is not finite is null."""
    case = outcome.case
    columns = ("loss", "norm", "gradients", "weights")
    return {
        "name": case.name,
        "ranks": case.ranks,
        "passed": outcome.passed,
        **{name: {"difference": getattr(outcome, name), "bound": getattr(case, name)} for name in columns},
        "band": outcome.band or None,
        **{name: getattr(outcome, name) for name in ("start", "routing", "drift", "rounded", "data", "export")},
        "worst": outcome.worst,
        "error": outcome.error or None,
        "overrides": [*case.overrides, *case.base],
    }


def compare(case: Case, run: Trace, reference: Trace) -> Outcome:
    """Return the differences of a run from its reference, to be judged by the case's fixed bounds."""
    changed = sum(not torch.equal(run.start[name], weight) for name, weight in reference.start.items())
    changed += run.odd + reference.odd
    return Outcome(
        case=case,
        differences=differ(run, reference),
        start=changed,
        routing=misrouted(run, reference),
        drift=run.drift,
        rounded=run.rounded,
        data=reference.data,
        export=run.export,
        doubtful=reference.doubtful,
    )


def differ(run: Trace, reference: Trace, draw: bool = False) -> Differences:
    """Return the relative differences of a run from its reference, by column and entry. The rounding of updates is
    subtracted, but not for a `draw`, which measures rounding.
    """
    steps, start = 0 if draw else len(run.losses), reference.start
    # a reference in float64 has no columns; a column may be close to 0, as a divergence is
    columns = zip(run.columns, reference.columns, strict=bool(reference.columns))
    apart = [_finite(abs(value - right) / max(abs(right), 1.0)) for value, right in columns]
    return {
        "loss": {"loss": _largest(run.losses, reference.losses)} | ({"columns": max(apart)} if apart else {}),
        "norm": {"norm": _largest(run.norms, reference.norms)},
        "gradients": {
            name: _relative(run.gradients[name] - gradient, gradient) for name, gradient in reference.gradients.items()
        },
        "weights": {
            name: _moved(run.weights[name], weight, start[name], steps) for name, weight in reference.weights.items()
        },
    }


def lost(case: Case, error: str) -> Outcome:
    """Return the outcome of a case that has failed: every difference is infinite."""
    return Outcome(
        case=case,
        differences={column: {"": math.inf} for column in ("loss", "norm", "gradients", "weights")},
        start=0,
        routing=0,
        drift=0,
        rounded=0,
        error=error,
    )


def rounds_alike(job: Job, reference: Job) -> bool:
    """Whether a layout rounds like its reference, apart from the order of sums. Only then do repeated runs of the
    reference measure the layout's band.
    """
    # float8_all_gather is ignored, as gathering in Float8 causes no additional rounding
    precisions = [{**vars(of_both.precision), "float8_all_gather": False} for of_both in (job, reference)]
    return precisions[0] == precisions[1] and job.optimizer.masters == reference.optimizer.masters


def whole_parts(global_batch: int, wanted: int) -> int:
    """Return the number of equal parts in which a draw cuts a global batch: the smallest divisor that is not below
    `wanted`, or one part for each sample. A batch of three, which has no half, is cut into three.
    """
    return next((parts for parts in range(wanted, global_batch) if global_batch % parts == 0), global_batch)


def parts_of_linears(job: Job) -> int:
    """Return the number of parts in which the draws for a layout compute each linear. Tensor-parallel ranks do so. Ranks
    of context parallelism round parts of attention to the compute dtype before they merge them; parts of linears are
    rounded in the same way.
    """
    parts, narrow = job.parallelism.tp, job.precision.compute_dtype != "float32"
    return max(parts, 2) if job.parallelism.cp > 1 and narrow else parts


def widen(spread: Differences, draw: Differences) -> Differences:
    """Return for each entry the larger of its values in `spread` and `draw`."""
    return {
        column: {name: max(value, spread.get(column, {}).get(name, 0.0)) for name, value in values.items()}
        for column, values in draw.items()
    }


def flips(reference: Trace, optimizer: str) -> dict[str, float]:
    """Return for each parameter the relative difference that one element makes if it moves in the opposite direction in
    one step; {} for SGD.

    AdamW moves an element by the learning rate, however small its gradient is. If rounding decides the gradient's sign,
    it decides the direction of the move. For a matrix the draws measure how often this happens. In a vector of 64
    elements one such move makes a difference of 0.08 after three steps, and most draws contain no such move.
    """
    if optimizer == "sgd":
        return {}
    moved = {name: (weight - reference.start[name]).double() for name, weight in reference.weights.items()}
    return {
        name: (2 / len(reference.losses) * move.abs().max() / move.norm().clamp(min=1e-30)).item()
        for name, move in moved.items()
    }


def beyond(differences: Differences, spread: Differences, once: dict[str, float]) -> float:
    """Return the largest ratio of a difference to its limit. The limit is MULTIPLE times the spread; for a weight, its
    entry in `once` (`flips`) is added. The limit is never below the column's TIGHT tolerance.
    """
    room = {"weights": once}
    return max(
        value
        / max(tight, MULTIPLE[column] * spread.get(column, {}).get(name, 0.0) + room.get(column, {}).get(name, 0.0))
        for column, tight in TIGHT.items()
        for name, value in differences[column].items()
    )


def misrouted(run: Trace, reference: Trace) -> int:
    """Count the experts, over all steps, whose number of tokens differs from the reference, and the routers' biases
    that differ at the end.
    """
    steps = zip(run.loads, reference.loads, strict=False)
    tokens = sum(
        count != expected
        for ours, theirs in steps
        for layer in theirs
        for count, expected in zip(ours[layer], theirs[layer], strict=True)
    )
    return tokens + sum(not torch.equal(run.biases[name], bias) for name, bias in reference.biases.items())


def _moved(weight: torch.Tensor, reference: torch.Tensor, start: torch.Tensor, steps: int) -> float:
    """Return the distance between a weight and the reference's weight, relative to the distance that the latter has
    moved.

    Each update rounds a float32 weight by up to 2**-24 of its value. This rounding is subtracted, because it is nearly
    as large as the changes that SGD makes to a norm's weight, which is about 1.
    """
    rounding = steps * 2.0**-24 * reference.double().norm()
    difference = (weight.double() - reference.double()).norm()
    return _relative((difference - rounding).clamp(min=0) if difference.isfinite() else difference, reference - start)


def _relative(difference: torch.Tensor, reference: torch.Tensor) -> float:
    return _finite((difference.double().norm() / reference.double().norm().clamp(min=1e-30)).item())


def _largest(values: list[float], references: list[float]) -> float:
    return max(
        _finite(abs(value - reference) / max(abs(reference), 1e-30))
        for value, reference in zip(values, references, strict=True)
    )


def _finite(value: float) -> float:
    """Return the value, or infinity if it is NaN, as max() would drop a NaN."""
    return value if math.isfinite(value) else math.inf
