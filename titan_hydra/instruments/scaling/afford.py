"""What a number of GPUs can train until a date: the size, its tokens, the fastest layout that `titan plan` finds, and the
loss that the law expects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.fault import bad_value
from titan_hydra.experiments.compose.compose import compose_cells, compose_unchecked
from titan_hydra.experiments.compose.describe import option_files
from titan_hydra.experiments.plan.search import Row, search
from titan_hydra.experiments.plan.shape import NotPredictable
from titan_hydra.experiments.runs.find import RunCell

from .ladder import model_near, model_of, parameters_in
from .law import Law

STEPS = (2.0, 1.4, 1.2)  # factors by which the search for the best size changes the number of heads, the coarsest first
USED = 0.4  # assumed fraction of the matmul rate that training reaches; used only for the first guess
DAY = 86_400.0


@dataclass(frozen=True)
class Offer:
    """A size that the GPUs can train for the whole time: its job, its layout, and its tokens."""

    job: Job
    row: Row
    parameters: int  # counted as for the law
    tokens: float


def job_to_plan(overrides: list[str], cell: RunCell, config_dir: list[Path] | None) -> Job:
    """Return the job whose sizes are planned. If the overrides choose a model, they define the job; otherwise, they
    change the job of a cell of the ladder. Raises ConfigError.
    """
    if any(override.startswith("model=") for override in overrides):
        job = compose_unchecked(*overrides, config_dir=config_dir)
    else:
        job = compose_cells([*cell.overrides, *overrides], config_dir)[0][0]
    if job.hardware.name == "unknown":
        names = tuple(file.stem for file in option_files("hardware") if file.stem != "unknown")
        raise bad_value("hardware", "unknown", "a plan needs the device's memory and rates", *names)
    return job


def best_offer(job: Job, gpus: int, days: float, law: Law, count: Callable[[Job], int]) -> Offer:
    """Return the size with the lowest expected loss after `days` on `gpus` devices; `count` gives a job's parameters as
    the law counts them. Raises ConfigError if no size fits.
    """
    offers: dict[int, Offer | None] = {}

    def loss(heads: int) -> float:
        if heads not in offers:
            offers[heads] = offer_of(job, heads, gpus, days, count)
        offer = offers[heads]
        return float(law.loss(offer.parameters, offer.tokens)) if offer else float("inf")

    rate = 1e12 * job.hardware.bf16_tflops
    at = model_near(job.model, float(law.best_size(USED * rate * gpus * days * DAY))).n_heads
    while at > 1 and loss(at) == float("inf"):
        at //= 2  # the size of the first guess does not fit on the GPUs
    for ratio in STEPS:
        while True:
            near = [max(1, round(at / ratio)), at, max(at + 1, round(at * ratio))]
            if (best := min(near, key=loss)) == at:
                break
            at = best
    if (found := offers[at]) is None:
        raise bad_value("--gpus", gpus, f"no size of {job.model.name} fits on {job.hardware.name}")
    return found


def offer_of(job: Job, heads: int, gpus: int, days: float, count: Callable[[Job], int]) -> Offer | None:
    """Return the fastest layout of the size with `heads` heads, and its tokens; None if none fits."""
    import copy

    sized = copy.copy(job)
    sized.model = model_of(job.model, heads)
    try:
        rows, _ = search(sized, gpus)
    except NotPredictable as error:
        raise ConfigError(str(error)) from error
    if not rows or rows[0].prediction.fits == "no":
        return None
    fastest = max(rows, key=lambda row: row.prediction.speed.tokens_per_second)
    tokens = fastest.prediction.speed.tokens_per_second * gpus * days * DAY
    return Offer(sized, fastest, count(sized), tokens)


def parameters_of_job(job: Job, body: bool) -> int:
    """Return the parameters of a job's model: all or, with `body`, those outside the embedding and the head."""
    model = job.model
    ends = (1 if model.tie_embeddings else 2) * model.vocab_size * model.dim
    return parameters_in(model) - (ends if body else 0)
