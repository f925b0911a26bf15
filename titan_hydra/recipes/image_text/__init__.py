"""Decoders that read images: a vision tower of Siglip2's kind (arXiv 2502.14786) before Llama 3 or Qwen3."""

from titan_hydra.config.family import Family, register

from .config import Llama3VisionConfig, Qwen3VisionConfig, modules_with_tower

for name, config in (("llama3_vision", Llama3VisionConfig), ("qwen3_vision", Qwen3VisionConfig)):
    register(
        Family(
            name,
            config,
            model=f"titan_hydra.models.image_text.model:{config.__name__.removesuffix('Config')}",
            sharding=f"titan_hydra.models.image_text.sharding:{name}",
            modules=modules_with_tower,
            flops=None,  # the tower's depend on the images
        )
    )
