"""Decoders of the library transformers: model=transformers model.path=FOLDER trains what the folder's config.json
describes. Only ranks and launchers of jobs that name this family import transformers.
"""

from titan_hydra.core.job.config.family import Family
from titan_hydra.core.job.config.registry import register

from .config import TransformersConfig, faults, flops_of_token, kept_by_blocks, linears, parameters

register(
    Family(
        "transformers",
        TransformersConfig,
        model=f"{__name__}.model:Transformers",
        sharding=f"{__name__}.sharding:plan",
        hf=f"{__name__}.hf:HF",
        fill=TransformersConfig.frozen,
        flops=flops_of_token,
        exact=f"{__name__}.exact:logits_of_library",
        kept=kept_by_blocks,
        linears=linears,
        parameters=parameters,
        faults=faults,
    )
)
