"""The reference for proofs: transformers' own model in float64, with its plainest attention and experts, for each document
by itself, so that no mask and no position of packed documents is shared with a run.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.func import functional_call

from titan_hydra.core.job.config import from_dict, to_dict
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.models.hf import hf_of

from .config import TransformersConfig
from .known import library_config


def logits_of_library(weights: dict[str, Tensor], batch: dict[str, Tensor], job: Any) -> Tensor:
    """Return the logits of a batch [batch, seq, vocab]."""
    model, names = _model(json.dumps(to_dict(job.model))), hf_of(job.model)
    by_their_name = {names.name(name): weight for name, weight in weights.items()}
    documents = batch.get("documents", torch.zeros_like(batch["tokens"]))
    rows = []
    for tokens, numbers in zip(batch["tokens"], documents, strict=True):
        lengths = numbers.unique_consecutive(return_counts=True)[1].tolist()
        options = [{"input_ids": part.unsqueeze(0), "use_cache": False} for part in tokens.split(lengths)]
        rows.append(torch.cat([functional_call(model, by_their_name, (), one).logits[0] for one in options]))
    return torch.stack(rows)


@lru_cache(maxsize=2)
def _model(section: str) -> Any:
    """Return transformers' model of a model section in JSON."""
    from transformers import AutoModelForCausalLM

    theirs = library_config(cast(TransformersConfig, from_dict(Model, json.loads(section))))
    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_config(theirs, dtype=torch.float64, **plain).train()
