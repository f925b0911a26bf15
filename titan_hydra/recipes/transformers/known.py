"""What the installed transformers makes of a model section: its configuration object, and its model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import from_dict, to_dict
from titan_hydra.core.job.config.family import Linear
from titan_hydra.core.job.config.fault import bad_value, suggest
from titan_hydra.core.job.config.model import Model

from .config import SHARED

if TYPE_CHECKING:
    from .config import TransformersConfig


def library_config(config: TransformersConfig) -> Any:
    """Return transformers' configuration object for a model section. Keys that are set replace values of config.json.
    Raises ConfigError if transformers is not installed, or knows no such decoder.
    """
    try:
        from transformers import CONFIG_MAPPING
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        reason = f"transformers cannot be imported here ({error}); pip install 'titan_hydra[transformers]'"
        raise bad_value("model.family", config.family, reason) from error
    content = json.loads(config.content or "{}") | {"pad_token_id": None}
    kind = content.pop("model_type")
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        problem = (
            "no causal decoder"
            if kind in CONFIG_MAPPING
            else "not known to the installed transformers, and code of a folder is not run"
        )
        raise bad_value(
            "model.path",
            config.path,
            f"model_type={kind} is {problem}",
            *suggest(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES),
        )
    try:
        theirs = CONFIG_MAPPING[kind](**content)
        changed = {
            name: getattr(config, ours)
            for ours, name in SHARED.items()
            if getattr(config, ours) is not None and getattr(config, ours) != getattr(theirs, name, None)
        }
        if changed.get("num_hidden_layers") and content.get("layer_types"):
            changed["layer_types"] = shortened(content["layer_types"], changed["num_hidden_layers"])
        return CONFIG_MAPPING[kind](**content | changed) if changed else theirs
    except Exception as error:  # transformers checks its configurations with exceptions of many kinds
        reason = f"transformers refuses this config.json: {' '.join(str(error).split())}"
        raise bad_value("model.path", config.path, reason) from error


def shortened(kinds: list[str], layers: int) -> list[str]:
    """Return the kinds of blocks of a model with another number of blocks: the first ones, repeated if there are too few.
    Each kind of the whole model is kept, as the last block if it would be lost.
    """
    first_kinds = (kinds * -(-layers // len(kinds)))[:layers]
    lost = [kind for kind in dict.fromkeys(kinds) if kind not in first_kinds][: layers - 1]
    return first_kinds[: layers - len(lost)] + lost


def build_library_model(config: TransformersConfig) -> Any:
    """Build transformers' model on the current default device, in float32. Raises ConfigError if it cannot be built."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from titan_hydra.core.parallel.formats.select import quietly

    theirs = library_config(config)
    logging.set_verbosity_error()
    try:
        with quietly():  # transformers imports torchao
            return AutoModelForCausalLM.from_config(theirs, dtype=torch.float32)
    except (ValueError, ImportError, TypeError, AttributeError) as error:
        reason = f"transformers cannot build a {theirs.model_type}: {' '.join(str(error).split())}"
        raise ConfigError(f"model.path={config.path}: {reason}") from error


@dataclass(frozen=True)
class Counts:
    """What checks, predictions and adapters need of a model: its parameters, the linears of a block in running order, and the
    widths of its packed experts by which FSDP may shard them.
    """

    parameters: int
    linears: tuple[Linear, ...]
    expert_widths: tuple[int, ...]


def counts_of(config: TransformersConfig) -> Counts:
    """Count transformers' model on the meta device. Blocks of several kinds have their linears together; experts are
    linears that multiply each token as often as a router chooses experts.
    """
    return _counts(json.dumps(to_dict(config)))


@lru_cache(maxsize=8)
def _counts(section: str) -> Counts:
    import torch
    from torch import nn

    from .model import Transformers
    from .sharding import words_of_plan

    config = cast("TransformersConfig", from_dict(Model, json.loads(section)))
    with torch.device("meta"):
        model = Transformers(config, 1)
    found: dict[str, Linear] = {}
    for block in model.layers.values():
        words = words_of_plan(block)
        for path, part in block.named_modules():
            name = path.rpartition(".")[2]
            if type(part) is nn.Linear and name not in found:
                word = words.get(path, "")
                column = word.startswith("colwise")
                found[name] = Linear(name, part.in_features, part.out_features, column=column, whole=not word)
    parameters = dict(model.named_parameters())
    widths = {weight.shape[1] for name, weight in parameters.items() if ".experts." in name and weight.dim() > 1}
    return Counts(sum(map(torch.numel, parameters.values())), tuple(found.values()), tuple(sorted(widths)))
