"""Decoders that read images: a vision tower of Siglip2's kind (arXiv 2502.14786) before Llama 3 or Qwen3."""

from titan_hydra.core.job.config.family import Family, causal_keys, family_named
from titan_hydra.core.job.config.registry import DataSourceKind, ObjectiveKind, register
from titan_hydra.core.job.config.source import FileSource
from titan_hydra.recipes.chat import TURNS

from .config import (
    IllustratedText,
    Llama3VisionConfig,
    Qwen3VisionConfig,
    modules_with_tower,
    parameters_with_tower,
    stacks_with_tower,
)

GIVEN = (*TURNS, "patches", "cells", "images", "places")
TAKEN = "text with images"
IMAGES = f"{__name__}.images"
for name, config in (("llama3_vision", Llama3VisionConfig), ("qwen3_vision", Qwen3VisionConfig)):
    register(
        Family(
            name,
            config,
            model=f"{__name__}.model:{config.__name__.removesuffix('Config')}",
            sharding=f"{__name__}.sharding:{name}",
            modules=modules_with_tower,
            parameters=parameters_with_tower(family_named(name.removesuffix("_vision")).parameters),
            stacks=stacks_with_tower,
            attended=causal_keys,
            flops=None,  # no formula: the tower's FLOPs depend on the images
            takes=TAKEN,
        )
    )
register(
    ObjectiveKind(
        "image_text",
        f"{__name__}.objective:ImageText",
        IllustratedText,
        needs=GIVEN,
        makes=TAKEN,
        head_loss=True,
        split_logits=True,
        faults=f"{__name__}.rules:faults",
        cases=f"{__name__}.cases:CASES",
        exact=f"{__name__}.exact:illustrated",
    )
)
register(
    DataSourceKind(
        "image_text",
        f"{IMAGES}:open_image_text",
        FileSource,
        documents=False,
        needs_path=True,
        suffixes=(".tar",),
        gives=GIVEN,
        encodes=True,
        warnings=f"{IMAGES}:warnings_of_captions",
    )
)
register(
    DataSourceKind(
        "synthetic_image_text",
        f"{IMAGES}:draw_image_text",
        documents=False,
        gives=GIVEN,
        encodes=True,
    )
)
