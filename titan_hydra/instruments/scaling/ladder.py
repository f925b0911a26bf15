"""A ladder: several sizes of a model that follow from one rule, each trained on several numbers of tokens with the same
recipe.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from math import isfinite, log
from typing import Any

import yaml

from titan_hydra.core.base.amounts import brief
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import bad_value, divisors
from titan_hydra.core.job.config.model import Model
from titan_hydra.experiments.compose.describe import groups
from titan_hydra.experiments.compose.sweep import key_of

SHAPE = ("dim", "n_layers", "n_heads", "n_kv_heads")  # the keys that a size sets in every family
WIDTHS = ("ffn_dim", "expert_dim", "q_lora_rank", "kv_lora_rank")  # keys that grow with dim, if the model sets them
MULTIPLE = 8  # a width is rounded to a multiple of this, unless the model's own width is not a multiple
MOST_HEADS = 4096


def model_of(base: Model, heads: int) -> Model:
    """Return the model with this number of query heads. This is the rule of a ladder: a model has the same width of a
    head as `base`, and the same ratios of width, depth, key/value heads and feed-forward to the number of heads.
    """
    times, model = heads / base.n_heads, copy.copy(base)
    model.n_heads, model.dim = heads, base.dim * heads // base.n_heads
    model.n_layers = max(1, round(base.n_layers * times))
    model.n_kv_heads = min(divisors(heads), key=lambda kv: (abs(log(kv / (base.n_kv_heads * times))), -kv))
    for name in WIDTHS:
        if width := getattr(base, name, None):
            step = 1 if width % MULTIPLE else MULTIPLE
            setattr(model, name, max(step, round(width * times / step) * step))
    return model


def parameters_in(model: Model) -> int:
    """Return the number of parameters of a model, as its family counts them. Raises ConfigError for a family that does
    not count them, or that has blocks outside a decoder.
    """
    family = family_of(model)
    if family.parameters is None or family.stacks is not None:
        reason = "has no formula for its parameters" if family.parameters is None else "is not a decoder alone"
        raise bad_value("model.family", model.family, f"{reason}, so no rule gives its sizes")
    return family.parameters(model)


def model_near(base: Model, parameters: float) -> Model:
    """Return the model of the rule whose number of parameters is nearest to `parameters` (by ratio)."""
    if base.dim % base.n_heads:
        raise bad_value("model.dim", base.dim, f"the rule needs a multiple of model.n_heads={base.n_heads}")
    if not (isfinite(parameters) and parameters > 0):
        raise ConfigError(f"a size is a positive number of parameters, not {parameters}")
    before = model_of(base, 1)
    for heads in range(2, MOST_HEADS + 1):
        after = model_of(base, heads)
        if (more := parameters_in(after)) >= parameters:
            return before if log(parameters / parameters_in(before)) < log(more / parameters) else after
        before = after
    raise ConfigError(f"a size of {parameters:.3g} parameters needs more than {MOST_HEADS:,} heads")


def ladder_cells(job: Job, sizes: Sequence[float], multiples: Sequence[float]) -> dict[str, list[str]]:
    """Return the cells of a ladder, by name, as overrides of a job: one cell for each size and each ratio of tokens to
    parameters (`multiples`). The warm-up takes the same fraction of the steps as in the job.
    """
    if job.validation.name == "off":
        raise bad_value("validation", "off", "a ladder compares held-out losses", "on")
    cells: dict[str, list[str]] = {}
    for target in sizes:
        model = model_near(job.model, target)
        keys = (*SHAPE, *(name for name in WIDTHS if getattr(model, name, None)))
        shape = [f"model.{name}={getattr(model, name)}" for name in keys]
        for multiple in multiples:
            samples = multiple * parameters_in(model) / job.data.seq_len
            steps = max(1, round(samples / job.data.global_batch))
            tokens = steps * job.data.global_batch * job.data.seq_len
            warmup = max(1, round(job.lr_scheduler.warmup_steps / job.steps * steps))
            name = f"{brief(parameters_in(model))} on {brief(tokens)}"
            if name in cells:
                raise ConfigError(f"two cells would be {name}; sizes by this rule are {', '.join(near(job, target))}")
            cells[name] = [*shape, f"steps={steps}", f"lr_scheduler.warmup_steps={warmup}"]
    return cells


def near(job: Job, parameters: float) -> list[str]:
    """Return the sizes of the rule around a number of parameters, as texts."""
    heads = model_near(job.model, parameters).n_heads
    counts = [
        parameters_in(model_of(job.model, number_of_heads)) for number_of_heads in range(max(1, heads - 1), heads + 3)
    ]
    return [brief(count) for count in counts]


def sweep_file(name: str, overrides: Sequence[str], cells: dict[str, list[str]], comment: str) -> str:
    """Return the text of sweeps/NAME.yaml: the overrides of the recipe as its defaults and values, then the cells.
    Raises ConfigError for an override that a file cannot have.
    """
    from omegaconf import OmegaConf

    known, options, values = set(groups()), [], []
    for override in overrides:
        if override[0] in "+~" or "@" in key_of(override):
            raise ConfigError(f"{override}: a sweep file cannot hold it; give it to launch.py with the sweep")
        key, _, value = override.partition("=")
        options.append({f"override /{key}": value}) if key in known else values.append(override)
    content: dict[str, Any] = {"defaults": options} if options else {}
    typed_values: Any = OmegaConf.to_container(OmegaConf.from_dotlist(values), resolve=False)
    content |= typed_values
    content["sweep"] = {"name": name, "baseline": next(iter(cells)), "cells": cells}
    text = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=1_000)
    purpose = "Sizes of one model, each on several numbers of tokens, for a scaling law: titan scale."
    return f"# @package _global_\n# {purpose}\n# {comment}\n{text}"
