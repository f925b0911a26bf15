"""The rules of number formats: what Float8 and MXFP8 need, and what they cannot be combined with."""

from collections.abc import Iterator
from math import gcd

from titan_hydra.config.fault import Fault, multiples_around, suggest
from titan_hydra.config.registry import FORMATS
from titan_hydra.config.schema import Job
from titan_hydra.job.batches import microbatch_size
from titan_hydra.job.dtypes import has_one_scale


def recipe_is_chosen(job: Job) -> Iterator[Fault]:
    """A format with several recipes needs one of them; one with a single way to scale, and no format, have none."""
    format, recipe = FORMATS.get(job.precision.converter), job.precision.recipe
    recipes = format.recipes if format else ()
    if recipes and recipe is None:
        yield Fault("precision.recipe", None, f"precision.converter={job.precision.converter} needs one", legal=recipes)
    elif recipe is not None and recipe not in recipes:
        reason = f"precision.converter={job.precision.converter} has no such recipe"
        yield Fault("precision.recipe", recipe, reason, legal=suggest(recipe, recipes) or recipes or (None,))
    if format is None and job.precision.emulate:
        yield Fault("precision.emulate", True, "there is no number format to emulate", legal=(False,))


def widths_suit_the_format(job: Job) -> Iterator[Fault]:
    """The model's width is a multiple of the format's step. Linears of any other width would not be converted."""
    format, dim = FORMATS.get(job.precision.converter), job.model.dim
    if format and dim % format.step:
        reason = f"{format.name} linears need multiples of {format.step}"
        yield Fault("model.dim", dim, reason, legal=multiples_around(dim, format.step))


def tokens_suit_the_format(job: Job) -> Iterator[Fault]:
    """A weight's gradient is a matmul over the tokens of a microbatch, which the kernels take in the format's steps, as
    they do widths.
    """
    format, precision = FORMATS.get(job.precision.converter), job.precision
    if format is None or precision.emulate or precision.recipe in format.plain_gradients:
        return
    each = format.step // gcd(format.step, microbatch_size(job)) * job.parallelism.cp
    if job.data.seq_len % each:
        reason = f"{format.name} matmuls over the tokens of a microbatch need multiples of {format.step}"
        yield Fault("data.seq_len", job.data.seq_len, reason, legal=multiples_around(job.data.seq_len, each))


def weights_can_be_gathered(job: Job) -> Iterator[Fault]:
    """FSDP gathers Float8 weights that have a single scale (tensorwise), and only FSDP2 has the hooks for it."""
    if not job.precision.float8_all_gather:
        return
    if not has_one_scale(job):
        yield Fault(
            "precision.float8_all_gather", True, "only tensorwise Float8 weights can be gathered, as they have one scale", legal=(False,)
        )
    elif job.parallelism.backend != "fsdp2":
        yield Fault(
            "precision.float8_all_gather", True, f"parallelism.backend={job.parallelism.backend} gathers plain weights", legal=(False,)
        )


def fused_kernels_suit(job: Job) -> Iterator[Fault]:
    """Our own kernels cast by rows and by columns, of whole weights."""
    precision, format = job.precision, FORMATS.get(job.precision.converter)
    if precision.kernels == "torchao":
        return
    if precision.recipe not in (format.fused if format else ()):
        recipes = ", ".join(f"precision.recipe={recipe} of {kind.name}" for kind in FORMATS.values() for recipe in kind.fused)
        yield Fault("precision.kernels", precision.kernels, f"such kernels exist only for {recipes}", legal=("torchao",))
    elif job.parallelism.tp > 1:
        reason = f"they cast whole rows, which parallelism.tp={job.parallelism.tp} splits"
        yield Fault("precision.kernels", precision.kernels, reason, legal=("torchao",))


def emulation_is_eager(job: Job) -> Iterator[Fault]:
    """Emulation reproduces the numerics, not the speed. A compiler would fuse its casts and round in other places, but
    for those of our own kernels, into which it does not see.
    """
    if job.precision.emulate and job.compile.name != "off" and job.precision.kernels == "torchao":
        yield Fault("precision.emulate", True, f"compile={job.compile.name} would round in other places", legal=(False,))


def tensor_parallel_takes_the_format(job: Job) -> Iterator[Fault]:
    """Under tp with one scale a tensor the linears of a block share an input gathered in the format, so all of them are
    converted.
    """
    precision, format = job.precision, FORMATS.get(job.precision.converter)
    if job.parallelism.tp == 1 or format is None:
        return
    if not format.tensor_parallel:
        yield Fault("parallelism.tp", job.parallelism.tp, f"{format.name} linears are not split over ranks; FSDP shards them", legal=(1,))
    if has_one_scale(job) and not precision.emulate and precision.skip != ["output"]:
        reason = f"under tp with {precision.recipe} {format.name} the linears of a block share an input in that format"
        yield Fault("precision.skip", precision.skip, reason, legal=("[output]",))


RULES = [
    recipe_is_chosen,
    widths_suit_the_format,
    tokens_suit_the_format,
    weights_can_be_gathered,
    fused_kernels_suit,
    emulation_is_eager,
    tensor_parallel_takes_the_format,
]
