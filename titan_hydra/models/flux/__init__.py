"""FLUX.1: text to image by rectified flow, with a transformer over image and text (MMDiT, arXiv 2403.03206)."""

from titan_hydra.models import Family, register

from .config import FluxConfig, flops, no_linears, parameters, running_order

register(
    Family(
        "flux",
        FluxConfig,
        model="titan_hydra.models.flux.model:Flux",
        hf="titan_hydra.models.flux.hf:HF",
        modules=running_order,
        parameters=parameters,
        flops=flops,
        linears=no_linears,
        takes="latents",
        pipeline=False,
    )
)
