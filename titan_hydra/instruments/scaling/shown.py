"""What `titan scale` prints of ladders, predictions, comparisons and plans: as lines, and as JSON values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from titan_hydra.core.base.amounts import brief
from titan_hydra.core.base.text import table
from titan_hydra.experiments.plan import predict

from . import bootstrap
from .afford import Offer
from .bootstrap import LEVEL, Drawn, Interval90, LeftOut, RecipeVerdict
from .figures import Target
from .ladder import SHAPE
from .measured import MeasuredLadder, describe_ladder

TIMES = (1.0, 10.0, 100.0)  # budgets of the table of best sizes, relative to the run with most compute


@dataclass(frozen=True)
class ScalePart:
    """A part of the answer of `titan scale`. With `several`, the JSON field lists the values of all such parts."""

    field: str
    value: Any
    lines: list[str]
    targets: tuple[Target, ...] = ()
    several: bool = False


def as_document(parts: Sequence[ScalePart]) -> dict[str, Any]:
    """Return the JSON document of the parts."""
    document: dict[str, Any] = {}
    for part in parts:
        if part.several:
            document.setdefault(part.field, []).append(part.value)
        else:
            document[part.field] = part.value
    return document


def ladder_part(measured: MeasuredLadder, curve: Drawn) -> ScalePart:
    """Return the part about a fit: the ladder, the law with its intervals, and the best sizes for some budgets."""
    ladder, fit, reach = measured.ladder, curve.fit, bootstrap.reach_of(measured.ladder)
    constants = curve.constants()
    lines = [f"{measured.name}: {describe_ladder(ladder)}", *measured.notes, ""]
    lines += [f"L(N, D) = E + A / N^alpha + B / D^beta, each with its interval of {LEVEL:.0%}"]
    lines += [f"  {name:<6} {with_interval(value)}" for name, value in constants.items()]
    lines += [f"  noise of a run: {fit.noise:.2%} of its loss (five numbers are fitted to {len(ladder.losses)} cells)"]
    if fit.at_bound:
        lines += [f"  not determined by these runs: {', '.join(fit.at_bound)}, at a bound of the search"]
    rows = [_best_row(curve, times) for times in TIMES if times <= reach * (1 + 1e-9)]
    titles = ("of the largest run", "compute (FLOPs)", "best size", "tokens", "held-out loss")
    columns = (
        ladder.parameters,
        ladder.tokens,
        ladder.losses,
        fit.law.loss(ladder.parameters, ladder.tokens),
        ladder.runs,
    )
    names = ("parameters", "tokens", "loss", "fitted", "runs")
    value = {
        "name": measured.name,
        "notes": measured.notes,
        "law": {name: around(constant) for name, constant in constants.items()},
        "at_bound": list(fit.at_bound),
        "noise": fit.noise,
        "reach": reach,
        "cells": [dict(zip(names, map(float, row), strict=True)) for row in zip(*columns, strict=True)],
    }
    return ScalePart("ladders", value, [*lines, "", *table(titles, rows, titles), ""], several=True)


def _best_row(curve: Drawn, times: float) -> tuple[str, ...]:
    """Return the texts of a budget: its compute, the best size for it, that size's tokens, the expected loss of a run."""
    flops = times * float(curve.fit.ladder.flops.max())
    size = bootstrap.interval_of(curve.fit.law.best_size(flops), curve.laws.best_size(flops))
    sizes = f"{brief(size.value)} ({brief(size.low)} to {brief(size.high)})"
    tokens = flops / 6 / size.value
    return (
        f"{times:g} x",
        f"{flops:.3g}",
        sizes,
        brief(tokens),
        with_interval(curve.predicted(size.value, tokens), ".4f"),
    )


def around(interval: Interval90) -> dict[str, Any]:
    return {"value": interval.value, "interval": [interval.low, interval.high]}


def with_interval(interval: Interval90, form: str = ".4g") -> str:
    return f"{interval.value:{form}} ({interval.low:{form}} to {interval.high:{form}})"


def prediction_part(name: str, curve: Drawn, size: float, tokens: float, reach: float | None) -> ScalePart:
    """Return the part about one run that is predicted. Raises ConfigError if it is beyond the reach of the ladder."""
    factor = bootstrap.require_reach(curve.fit.ladder, size, tokens, reach)
    loss = curve.predicted(size, tokens)
    value = {"name": name, "parameters": size, "tokens": tokens, "flops": 6 * size * tokens}
    line = f"{name}: {brief(size)} parameters on {brief(tokens)} tokens: held-out loss {with_interval(loss, '.4f')}; {how_far(factor)}"
    value |= {"loss": around(loss), "factor": factor}
    return ScalePart("predictions", value, [line], ((size, tokens, loss),), several=True)


def how_far(factor: float) -> str:
    return f"{factor:.3g} x beyond the ladder" if factor > 1 else "within the ladder"


def verdict_part(names: Sequence[str], verdict: RecipeVerdict) -> ScalePart:
    """Return the part about two recipes: their losses at a budget, which wins and how surely, and where they cross."""
    first, second = names
    winner, share = (first, verdict.first_wins) if verdict.first_wins >= 0.5 else (second, 1 - verdict.first_wins)
    lines = [f"{first} and {second} at {verdict.flops:.3g} FLOPs, each at its best size:"]
    lines += [f"  {name}: {with_interval(loss, '.4f')}" for name, loss in zip(names, verdict.losses, strict=True)]
    lines += [f"  {second} minus {first}: {with_interval(verdict.difference, '+.4f')}"]
    lines += [f"  {winner} has the lower curve there in {share:.0%} of the bootstrap's draws"]
    crossings = [f"{with_interval(crossing, '.3g')} FLOPs" for crossing in verdict.crossings]
    lines += [
        f"  the curves cross at {' and at '.join(crossings)}" if crossings else "  the curves do not cross within reach"
    ]
    value = {
        "flops": verdict.flops,
        "losses": {name: around(loss) for name, loss in zip(names, verdict.losses, strict=True)},
        "difference": around(verdict.difference),
        "first_wins": verdict.first_wins,
        "crossings": [around(crossing) for crossing in verdict.crossings],
    }
    return ScalePart("comparison", value, lines)


def backtest_part(largest: LeftOut, others: Sequence[LeftOut]) -> ScalePart:
    """Return the part about runs that were left out and predicted."""
    rows = [_left_out_row(left_out) for left_out in (largest, *others)]
    inside = sum(left_out.inside for left_out in others)
    titles = ("left out", "cells of the fit", "beyond them", "measured", "predicted", "inside")
    lines = [
        "left out, and predicted: first a run of the largest size, from the smaller sizes; then each from the cells with less compute",
        *table(titles, rows, titles[1:-1]),
        f"{inside} of {len(others)} are in their interval of {LEVEL:.0%}, {'and so is' if largest.inside else 'but not'} that "
        "of the largest size",
    ]
    value = {
        "largest": _left_out_json(largest),
        "draws": [_left_out_json(left_out) for left_out in others],
        "inside": inside,
    }
    return ScalePart("backtest", value, lines)


def _left_out_row(left_out: LeftOut) -> tuple[str, ...]:
    """Return a row of the table of runs that were left out and predicted."""
    name = f"{brief(left_out.parameters)} on {brief(left_out.tokens)}"
    predicted = with_interval(left_out.predicted, ".4f")
    return (
        name,
        str(left_out.cells),
        f"{left_out.factor:.2f} x",
        f"{left_out.measured:.4f}",
        predicted,
        "yes" if left_out.inside else "no",
    )


def _left_out_json(left_out: LeftOut) -> dict[str, Any]:
    """Return a run that was left out and predicted, as JSON values."""
    about = {
        "parameters": left_out.parameters,
        "tokens": left_out.tokens,
        "cells": left_out.cells,
        "factor": left_out.factor,
    }
    return about | {"measured": left_out.measured, "predicted": around(left_out.predicted), "inside": left_out.inside}


def offer_part(name: str, curve: Drawn, offer: Offer, gpus: int, days: float, reach: float | None) -> ScalePart:
    """Return the part about the best size that the given GPUs can train in the given time. Raises ConfigError if it is
    beyond the reach of the ladder.
    """
    factor = bootstrap.require_reach(curve.fit.ladder, offer.parameters, offer.tokens, reach)
    loss, model, prediction = curve.predicted(offer.parameters, offer.tokens), offer.job.model, offer.row.prediction
    shape = " ".join(f"model.{key}={getattr(model, key)}" for key in SHAPE)
    samples = prediction.job.data.global_batch * prediction.job.data.seq_len
    hours, rate = gpus * days * 24, prediction.speed.tokens_per_second
    lines = [
        f"{gpus:,} x {prediction.job.hardware.name} for {days:g} days, {hours:,.0f} GPU-hours:",
        f"  {model.name} of {brief(offer.parameters)} parameters on {brief(offer.tokens)} tokens, {how_far(factor)}",
        f"  held-out loss {with_interval(loss, '.4f')}, by the law of {name}",
        f"  {rate:,.0f} {prediction.shown_band} tokens/s/device, {prediction.peak.gib:.1f} GiB "
        f"({prediction.fits}): the interval does not have this band",
        f"  {shape} steps={offer.tokens / samples:.0f} {offer.row.overrides}",
    ]
    value = {
        "parameters": offer.parameters,
        "tokens": offer.tokens,
        "loss": around(loss),
        "factor": factor,
        "gpu_hours": hours,
        "overrides": f"{shape} steps={offer.tokens / samples:.0f} {offer.row.overrides}",
    }
    return ScalePart(
        "plan", value | {"layout": predict.as_json(prediction)}, lines, ((offer.parameters, offer.tokens, loss),)
    )
