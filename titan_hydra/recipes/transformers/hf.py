"""A model of transformers in its own format: the names of its tensors are transformers' own, and so is its config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from titan_hydra.core.models.hf import HuggingFace

from .config import SHARED, TransformersConfig, plain_content
from .known import library_config
from .model import Transformers


@dataclass(frozen=True)
class OwnFormat(HuggingFace):
    """`names` has transformers' names of the model's children, for one model."""

    def of(self, config: TransformersConfig) -> HuggingFace:
        with torch.device("meta"):
            return replace(self, names=Transformers(config, 1).names)

    def name(self, fqn: str) -> str:
        child, _, rest = fqn.partition(".")
        return f"{self.names[child]}.{rest}"


def to_config(config: TransformersConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of transformers' model, without token ids."""
    theirs = library_config(config)
    content = json.loads(config.content) | {
        name: getattr(theirs, name) for ours, name in SHARED.items() if getattr(config, ours) is not None
    }
    if "layer_types" in content:
        content["layer_types"] = list(theirs.layer_types)
    kinds = {"model_type": theirs.model_type, "torch_dtype": str(dtype).removeprefix("torch.")}
    return content | kinds | {"architectures": [architecture_of(theirs.model_type)]}


def architecture_of(model_type: str) -> str:
    """Return the name of transformers' class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def from_config(data: dict[str, Any], file: Path) -> TransformersConfig:
    """Return the model section for a config.json."""
    content = json.dumps(plain_content(data), sort_keys=True)
    return TransformersConfig(
        name=file.parent.name, family="transformers", path=str(file.parent), content=content
    ).frozen()


HF = OwnFormat("", {}, to_config, from_config)
