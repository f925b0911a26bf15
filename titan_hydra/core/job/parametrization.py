"""What a model's width and depth multiply: initial values, rates, scales of the forward. Imports no torch.

docs/transfer.md gives the formulas and their sources.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.parts import MaximalUpdate
from titan_hydra.core.job.config.registry import PARAMETRIZATIONS, resolve
from titan_hydra.core.job.config.schema import Parametrization


class RateFactors(NamedTuple):
    """The factors by which a parameter's learning rate, weight decay and epsilon are multiplied."""

    lr: float = 1.0
    weight_decay: float = 1.0
    eps: float = 1.0


class Start(NamedTuple):
    """How a parameter's initial values are drawn: from the distribution of the parameter `name` of the model `config`,
    with the standard deviation multiplied by `factor`.
    """

    name: str
    config: Model
    factor: float = 1.0


class Rules:
    """The standard parametrization: initial values are those of the family, and everything else is multiplied by 1."""

    attention = 1.0  # multiplies the queries, and thus attention's logits
    branch = 1.0  # multiplies what attention and feed-forward add to the residual stream
    output = 1.0  # multiplies the input of the head, and thus the model's logits

    def __init__(self, model: Model):
        self.model = model

    @property
    def scales(self) -> tuple[float, float, float]:
        """The scales of the forward. Weights must be used with the same scales with which they were trained."""
        return self.attention, self.branch, self.output

    def start(self, name: str) -> Start:
        """Return how the initial values of a parameter are drawn."""
        return Start(name, self.model)

    def factors(self, name: str, shape: Sequence[int], orthogonal: bool) -> RateFactors:
        """Return the factors of a parameter with this unsharded shape. `orthogonal` is whether the parameter's updates
        are orthogonal matrices (Muon). If not, the elements of an update have equal sizes (AdamW).
        """
        return RateFactors()


class MaximalUpdateRules(Rules):
    """muP for the width (arXiv 2203.03466, table 8) and CompleteP for the depth (arXiv 2505.01618, table 1). Both are
    relative to a base model, which has the standard parametrization.
    """

    def __init__(self, model: Model, config: MaximalUpdate):
        super().__init__(model)
        self.base = replace(model, dim=config.base_dim)  # the initial distributions of this model are scaled
        self.width = model.dim / config.base_dim
        self.depth = model.n_layers / (config.base_layers or model.n_layers)
        self.attention = math.sqrt((config.base_head_dim or model.head_width) / model.head_width)
        self.branch, self.output = 1 / self.depth, 1 / self.width

    def start(self, name: str) -> Start:
        """A block has the initial distributions of the base model's block at the same fraction of the depth."""
        factor = {"hidden": self.width**-0.5, "router": 1 / self.width}.get(self.role(name), 1.0)
        parts = name.split(".")
        if parts[0] == "layers":
            parts[1] = str(int(int(parts[1]) / self.depth))
        return Start(".".join(parts), self.base, factor)

    def factors(self, name: str, shape: Sequence[int], orthogonal: bool) -> RateFactors:
        """Return the factors of the first table of docs/transfer.md or, for Muon, those in the text below it."""
        role = self.role(name)
        if orthogonal:
            lr = self._spectral(shape[0]) if role == "router" else 1.0
            eps = 1.0
        else:
            lr = 1 / self.width if role in ("hidden", "router") else 1.0
            # epsilon shrinks as the gradient does: with the width, except for a router, and in blocks with the depth
            eps = 1.0 if role == "router" else 1 / self.width
            if name.startswith("layers."):
                eps /= self.depth
        # a step decays a weight by lr * weight_decay, which must not depend on the size
        return RateFactors(lr, weight_decay=1 / lr, eps=eps)

    def role(self, name: str) -> str:
        """Return the role that the family gives a parameter."""
        role: Any = family_of(self.model).role  # a rule refuses families without roles
        return role(name)

    def _spectral(self, experts: int) -> float:
        """Return the factor of Muon's learning rate for a router, which maps the width to `experts` numbers. The
        spectral norm of its update should be sqrt(outputs / inputs) (arXiv 2310.17813); Muon's is 1 if this is below 1.
        """
        return math.sqrt(min(1.0, experts / self.model.dim) / min(1.0, experts / self.base.dim))


def rules_of(model: Model, parametrization: Parametrization) -> Rules:
    """Return the rules of a model's parametrization."""
    build: Any = resolve(PARAMETRIZATIONS[parametrization.name].rules) or (lambda model, config: Rules(model))
    return build(model, parametrization)
