"""The factors of muP and CompleteP for reference.py, written only from the papers: arXiv 2203.03466, table 8 and
definition 4.1 (attention); 2505.01618, table 1.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import Any

from titan_hydra.core.job.config.schema import Job


@dataclass
class Multipliers:
    """How much wider and deeper a model is than its base, and the factor of the products of queries and keys."""

    width: float
    depth: float
    sharpness: float

    @classmethod
    def of(cls, job: Job) -> Multipliers:
        """Return the factors of a job; with the standard parametrization: 1, 1 and 1 / sqrt(width of a head)."""
        head, given = job.model.head_width, job.parametrization
        if given.name == "standard":
            return cls(1.0, 1.0, head**-0.5)
        mup: Any = given
        return cls(
            job.model.dim / mup.base_dim,
            job.model.n_layers / mup.base_layers if mup.base_layers else 1.0,
            # proportional to 1 / head; at the base's head width: 1 / sqrt(head)
            math.sqrt(mup.base_head_dim or head) / head,
        )


def scaled_optimizer(name: str, shape: tuple[int, ...], job: Job) -> Any:
    """Return the optimizer's section with the rates of one parameter: its learning rates, decay and epsilon."""
    wide = Multipliers.of(job)
    scaled: Any = copy.copy(job.optimizer)
    if job.parametrization.name == "standard":
        return scaled
    inside, router = name.startswith("layers."), name.endswith("router.weight")
    if scaled.name == "muon" and inside and len(shape) > 1:
        # An update should have the spectral norm sqrt(outputs / inputs) (2310.17813); Muon's update of a wide matrix
        # has 1.
        ratio = math.sqrt(min(shape[0], job.model.dim) / min(shape[0], job.model.dim / wide.width) / wide.width)
        scaled.muon_lr *= ratio if router else 1
        scaled.weight_decay /= ratio if router else 1
        return scaled
    matrix = inside and len(shape) > 1
    scaled.lr /= wide.width if matrix else 1
    scaled.weight_decay *= wide.width if matrix else 1
    scaled.eps /= (1 if router else wide.width) * (wide.depth if inside else 1)
    return scaled
