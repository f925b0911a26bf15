"""DeepSeek-V3 (arXiv 2412.19437)."""

from titan_hydra.core.job.config.family import Family, causal_keys, decoder_role, register

from .config import DeepSeekV3Config, faults_of_further_predictions, flops, latent_clipped, linears, parameters

register(
    Family(
        "deepseek_v3",
        DeepSeekV3Config,
        model="titan_hydra.core.models.deepseek_v3.model:DeepSeekV3",
        sharding="titan_hydra.core.models.deepseek_v3.sharding:plan",
        hf="titan_hydra.core.models.deepseek_v3.hf:HF",
        parameters=parameters,
        flops=flops,
        linears=linears,
        role=decoder_role,
        attended=causal_keys,
        clipped=latent_clipped,
        faults=faults_of_further_predictions,
    )
)
