"""The rules of number formats: what Float8 and MXFP8 need, and what they cannot be combined with."""
from __future__ import annotations

from collections.abc import Iterator

from titan_hydra.config.fault import Fault
from titan_hydra.config.schema import Job

STEPS = {"float8": 16, "mxfp8": 32}  # the matmuls take dimensions in steps of this


def recipe_is_chosen(job: Job) -> Iterator[Fault]:
    """Float8 has several recipes, so one must be chosen; MXFP8 has a single recipe, and no converter has none."""
    converter, recipe = job.precision.converter, job.precision.recipe
    if converter == "float8" and recipe is None:
        yield Fault("precision.recipe", None, "precision.converter=float8 needs one", legal=("rowwise", "tensorwise"))
    if converter != "float8" and recipe is not None:
        yield Fault("precision.recipe", recipe, f"belongs to precision.converter=float8, and that is {converter}", legal=(None,))
    if converter is None and job.precision.emulate:
        yield Fault("precision.emulate", True, "there is no converter whose format could be emulated", legal=(False,))


def widths_suit_the_format(job: Job) -> Iterator[Fault]:
    """The model's width is a multiple of the format's step. Linears of any other width would not be converted."""
    step = STEPS.get(job.precision.converter)
    if step and job.model.dim % step:
        around = (job.model.dim // step * step, (job.model.dim // step + 1) * step)
        yield Fault("model.dim", job.model.dim, f"{job.precision.converter} linears need multiples of {step}", legal=around)


def float8_is_gathered_tensorwise(job: Job) -> Iterator[Fault]:
    """FSDP gathers Float8 weights that have a single scale (tensorwise), and only FSDP2 has the hooks for it."""
    if not job.precision.float8_all_gather:
        return
    if (job.precision.converter, job.precision.recipe) != ("float8", "tensorwise"):
        yield Fault("precision.float8_all_gather", True, "only tensorwise Float8 weights can be gathered, as they have one scale",
                    legal=(False,))
    elif job.parallelism.backend != "fsdp2":
        yield Fault("precision.float8_all_gather", True, f"parallelism.backend={job.parallelism.backend} gathers plain weights",
                    legal=(False,))


def emulation_is_eager(job: Job) -> Iterator[Fault]:
    """Emulation reproduces the numerics, not the speed. A compiler would fuse its casts and round in other places."""
    if job.precision.emulate and job.compile.name != "off":
        yield Fault("precision.emulate", True, f"is not for compile={job.compile.name}", legal=(False,))


def tensor_parallel_takes_the_format(job: Job) -> Iterator[Fault]:
    """Under tp with tensorwise scaling the linears of a block share an input gathered as Float8, so all of them are converted."""
    precision = job.precision
    if job.parallelism.tp == 1:
        return
    if precision.converter == "mxfp8":
        yield Fault("parallelism.tp", job.parallelism.tp, "MXFP8 linears are not split over ranks; FSDP shards them", legal=(1,))
    if precision.recipe == "tensorwise" and not precision.emulate and precision.skip != ["output"]:
        yield Fault("precision.skip", precision.skip, "under tp with tensorwise Float8 the linears of a block share a Float8 input",
                    legal=("[output]",))


RULES = [recipe_is_chosen, widths_suit_the_format, float8_is_gathered_tensorwise, emulation_is_eager, tensor_parallel_takes_the_format]
