"""Register a FLUX model whose modulations and output do not start at 0, so that the first step gives every parameter a
gradient. Name this module in `train.imports`.
"""

from dataclasses import dataclass, replace

from titan_hydra.core.models import family_of, register
from titan_hydra.core.models.init import Normal
from titan_hydra.recipes.flux import FluxConfig
from titan_hydra.recipes.flux.model import Flux


@dataclass
class Awake(FluxConfig):
    pass


class AwakeFlux(Flux):
    @staticmethod
    def initial_distribution(fqn, config):
        plain = Flux.initial_distribution(fqn, config)
        return Normal(0.1) if plain == 0.0 else plain


register(replace(family_of(FluxConfig(family="flux")), name="awake_flux", config=Awake, model="gpu_awake:AwakeFlux"))
