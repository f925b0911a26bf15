"""Fit a device's rates to measured runs, so that predictions of other layouts on this device become more accurate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.config.operation import Hardware
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.ranks import all_ranks
from titan_hydra.experiments.plan import time
from titan_hydra.experiments.plan.predict import changed

RATES = (
    "bf16_tflops",
    "float8_tflops",
    "attention_tflops",
    "flash_tflops",
    "memory_tbs",
    "nvlink_gbs",
    "nic_gbs",
    "passes_per_second",
)
# weight of the penalty on a rate's distance from its start value; because of it, rates on which the runs hardly depend
# do not change
PULL = 1e-3
# A data sheet gives the memory's rate within some per cent. A lower one looks like slower matmuls, so that two runs do not
# part the two, and a fit could change it several times over.
PULL_OF_KNOWN = {"memory_tbs": 0.3}
STEPS = (0.5, 0.2, 0.05, 0.01)  # successive step sizes of the search, as differences of a rate's natural logarithm


@dataclass(frozen=True)
class Measured:
    """A job and its measured seconds per step."""

    name: str
    job: Job
    step_seconds: float


@dataclass(frozen=True)
class Fit:
    """Rates fitted to runs. `fitted` names the rates that were fitted; all other rates are unchanged."""

    hardware: Hardware
    fitted: tuple[str, ...]
    runs: tuple[Measured, ...]
    notes: tuple[str, ...] = ()

    def residual(self, run: Measured) -> float:
        """Return the relative error of the prediction that the fitted rates give for a run."""
        return seconds(run, self.hardware) / run.step_seconds - 1


def seconds(run: Measured, hardware: Hardware) -> float:
    """Predict how many seconds a step of the run takes on a device."""
    return time.speed(on(run.job, hardware)).step_seconds


def on(job: Job, hardware: Hardware) -> Job:
    """Return a copy of the job whose device has the rates of `hardware`."""
    return changed(job, hardware=vars(hardware))


def measured(name: str, job: Job, tokens_per_second: float) -> Measured:
    """Return a `Measured` run; its seconds per step are computed from its tokens per second per device."""
    return Measured(name, job, job.data.global_batch * job.data.seq_len / all_ranks(job) / tokens_per_second)


def fit(runs: Iterable[Measured], start: Hardware) -> Fit:
    """Fit those rates on which the predicted times of the runs depend. The fit minimizes the sum of the squares of
    log(predicted time / measured time).

    The times of attention and of matmuls grow differently with the sequence length. Runs that all have the same length
    determine only the sum of the two times, so then both rates are changed by the same factor. Raises NotPredictable if
    `hardware` lacks a rate.
    """
    runs = tuple(runs)
    fitted = tuple(rate for rate in RATES if getattr(start, rate) is not None and _matters(runs, start, rate))
    together, notes = [[rate] for rate in fitted], ()
    lengths = sorted({run.job.data.seq_len for run in runs})
    if len(lengths) == 1 and "bf16_tflops" in fitted:
        attention = [rate for rate in ("attention_tflops", "flash_tflops") if getattr(start, rate) is not None]
        together = [
            ["bf16_tflops", *attention],
            *([rate] for rate in fitted if rate not in ("bf16_tflops", *attention)),
        ]
        fitted = (*fitted, *(rate for rate in attention if rate not in fitted))
        notes = (
            f"attention_tflops: all runs have sequences of {lengths[0]} tokens, so attention changes as matmuls do; a run of another "
            "length parts them",
        )
    rates = {rate: getattr(start, rate) for rate in fitted}
    best = _with(start, descend(rates, lambda values: _error(runs, _with(start, values), start), together))
    return Fit(best, fitted, runs, notes)


def descend(
    start: dict[str, float], error: Callable[[dict[str, float]], float], together: Iterable[list[str]] = ()
) -> dict[str, float]:
    """Return the values of constants near `start` for which `error` is least. The search changes one constant at a
    time, in ever smaller steps; it changes the constants in a list of `together` by the same factor.
    """
    groups = [*together] or [[name] for name in start]
    best, least = start, error(start)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for names in groups:
                for way in (exp(step), exp(-step)):
                    other = best | {name: best[name] * way for name in names}
                    if (off := error(other)) < least:
                        best, least, moved = other, off, True
                        break
    return best


def _with(hardware: Hardware, rates: dict[str, Any]) -> Hardware:
    return replace(hardware, **rates)


def _matters(runs: tuple[Measured, ...], start: Hardware, rate: str) -> bool:
    """Whether the runs depend on a rate: if the rate were a third lower, at least one run would take 1 % longer."""
    slower = replace(start, **{rate: getattr(start, rate) / 1.5})
    return any(seconds(run, slower) > 1.01 * seconds(run, start) for run in runs)


def _error(runs: tuple[Measured, ...], hardware: Hardware, start: Hardware) -> float:
    off = sum(log(seconds(run, hardware) / run.step_seconds) ** 2 for run in runs)
    changes = {rate: log(getattr(hardware, rate) / getattr(start, rate)) for rate in RATES if getattr(start, rate)}
    return off + sum(PULL_OF_KNOWN.get(rate, PULL) * change**2 for rate, change in changes.items())


def as_yaml(fitted: Fit, name: str) -> str:
    """Return the text of a file for conf/hardware: the rates, each with a comment that tells how it was found."""
    worst = max(abs(fitted.residual(run)) for run in fitted.runs)
    lines = [
        f"# {name}: calibrated from {counted(len(fitted.runs), 'run')}, whose times it gives within {worst:.0%}.",
        f"name: {name}",
        "measured: true",
    ]
    for key, value in vars(fitted.hardware).items():
        if key not in ("name", "measured") and value is not None:
            origin = "fitted" if key in fitted.fitted else f"as {fitted.hardware.name}"
            lines.append(f"{key}: {_yaml_value(value)}".ljust(28) + f"# {origin}")
    return "\n".join(lines) + "\n"


def _yaml_value(value: str | bool | int | float) -> str:
    """Return a value of a device as YAML, a float with four digits."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.4g}" if isinstance(value, float) else str(value)
