"""The rules of optimizers, and of what is kept or changed beside their updates."""

from collections.abc import Iterator

from titan_hydra.core.job.adapter import adapts
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.registry import OPTIMIZERS
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.dtypes import gathers_in_format


def optimizer_has_the_parameters_it_needs(job: Job) -> Iterator[Fault]:
    """Some optimizers need float32 parameters: a bf16 master weight would lose Muon's small updates."""
    if OPTIMIZERS[job.optimizer.name].needs_float32 and job.precision.param_dtype != "float32":
        yield fault_at(
            job, "precision.param_dtype", f"optimizer.name={job.optimizer.name} needs float32 parameters", "float32"
        )


def masters_can_be_split(job: Job) -> Iterator[Fault]:
    """Split masters are float32 weights; the model computes with their upper halves. Every technique that reads or sums
    weights must support them.
    """
    if job.optimizer.masters == "whole":
        return
    precision, kind = job.precision, OPTIMIZERS[job.optimizer.name]
    whys = {
        "precision.compute_dtype=float32 leaves nothing to split": precision.compute_dtype == "float32",
        "precision.param_dtype=bfloat16 has no float32 masters": precision.param_dtype != "float32",
        f"optimizer.name={kind.name} updates whole masters alone": not kind.splits_masters,
        "parallelism.backend=simple_fsdp rounds gradients to the dtype of the weights": job.parallelism.backend
        != "fsdp2",
        f"precision.converter={precision.converter} gathers weights in its own format, from float32": gathers_in_format(
            job
        ),
        f"adapter={job.adapter.name} has few of them": adapts(job),
        f"fault_tolerance={job.fault_tolerance.name} exchanges whole weights": job.fault_tolerance.name != "off",
    }
    if why := _first(whys):
        yield Fault("optimizer.masters", "split", why, legal=("whole",))


def states_can_be_offloaded(job: Job) -> Iterator[Fault]:
    """States in the host's memory are updated for some parameters at a time, and are not exchanged."""
    if not job.optimizer.offload:
        return
    kind = OPTIMIZERS[job.optimizer.name]
    whys = {
        f"optimizer.name={kind.name} may need all parameters in one step (by_parameter of its record)": not kind.by_parameter,
        f"fault_tolerance={job.fault_tolerance.name} exchanges what is on the devices": job.fault_tolerance.name
        != "off",
    }
    if why := _first(whys):
        yield fault_at(job, "optimizer.offload", why, False)


def averages_can_be_kept(job: Job) -> Iterator[Fault]:
    """The average of the weights is kept in float32 beside float32 weights, by one replica group."""
    if not job.optimizer.ema_decay:
        if job.validation.ema:
            yield fault_at(job, "validation.ema", "no average is kept; set optimizer.ema_decay=0.999", False)
        return
    if job.precision.param_dtype != "float32":
        yield fault_at(job, "precision.param_dtype", "optimizer.ema_decay needs float32 parameters", "float32")
    if job.fault_tolerance.name != "off":
        why = f"fault_tolerance={job.fault_tolerance.name} does not exchange averages"
        yield fault_at(job, "optimizer.ema_decay", why, 0.0)


def heads_can_be_clipped(job: Job) -> Iterator[Fault]:
    """QK-clip knows which weights make a head's logits, scales float32 weights, and sees all samples of a step."""
    if job.optimizer.qk_clip is None:
        return
    model, precision = job.model, job.precision
    whys = {
        f"model.family={model.family} normalizes queries and keys, which limits its logits": model.qk_norm,
        f"model.family={model.family} does not say which weights make a head's logits": family_of(model).clipped
        is None,
        f"adapter={job.adapter.name} does not train the weights of queries and keys": adapts(job),
        f"precision.param_dtype={precision.param_dtype} would round the scaled weights": precision.param_dtype
        != "float32",
        f"fault_tolerance={job.fault_tolerance.name} does not exchange logits": job.fault_tolerance.name != "off",
    }
    if why := _first(whys):
        yield fault_at(job, "optimizer.qk_clip", why, None)


def _first(whys: dict[str, bool]) -> str | None:
    """Return the first reason that holds, or None."""
    return next((why for why, holds in whys.items() if holds), None)


RULES = (
    optimizer_has_the_parameters_it_needs,
    masters_can_be_split,
    states_can_be_offloaded,
    averages_can_be_kept,
    heads_can_be_clipped,
)
