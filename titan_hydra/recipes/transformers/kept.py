"""Count what the forward of transformers' blocks keeps for the backward, in torch's fake mode, for `titan plan`."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from titan_hydra.core.base.private import FakeTensorMode
from titan_hydra.core.job.config import from_dict, to_dict
from titan_hydra.core.job.config.model import Model

from .config import TransformersConfig
from .model import Transformers

FEW = 2  # the smaller of two numbers of blocks whose difference is counted, as every further block keeps the same


def bytes_kept(job: Any) -> float:
    """Return the bytes per token that a block's forward keeps, as a mean over the kinds of blocks."""
    return _bytes(json.dumps(to_dict(job.model)), job.data.seq_len, job.precision.compute_dtype)


@lru_cache(maxsize=32)
def _bytes(section: str, seq_len: int, dtype: str) -> float:
    config = cast(TransformersConfig, from_dict(Model, json.loads(section)))
    kinds = len(set(json.loads(config.content or "{}").get("layer_types") or ["one"]))
    period = 6 if kinds > 1 else 1  # Gemma 3 has the longest known period of kinds of blocks
    sizes = [_saved(replace(config, n_layers=FEW + more), seq_len, getattr(torch, dtype)) for more in (0, period)]
    return (sizes[1] - sizes[0]) / period / seq_len


def _saved(config: TransformersConfig, seq_len: int, dtype: torch.dtype) -> int:
    """Return the bytes of all tensors that the forward of one sample saves, each storage once, without the weights."""
    with torch.device("meta"):
        model = Transformers(config, seq_len).to(dtype)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        return _saved_by(model, torch.zeros(1, seq_len, dtype=torch.int64))


def _saved_by(model: Transformers, tokens: Tensor) -> int:
    beside = {StorageWeakRef(weight.untyped_storage()) for weight in [*model.parameters(), *model.buffers()]}
    found: dict[StorageWeakRef, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        found[StorageWeakRef(storage)] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens)
    return sum(size for storage, size in found.items() if storage not in beside)
