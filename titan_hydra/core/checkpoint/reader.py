"""Read single tensors of a checkpoint, or of adapters merged into the frozen weights with which they were trained."""

import pickle
import re
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from titan_hydra.core.base.errors import CheckpointError, ConfigError

from . import safe
from .folder import Folder
from .planner import LoadPlanner

PREFIX = "model."  # prefix of the names of parameters in a checkpoint
EMA = re.compile(r"optimizer\.state\.(.+)\.ema")  # names of the averages in a checkpoint (core/train/ema.py)


class Reader:
    """Reads tensors of a checkpoint, without running code. Its index, which can be large, is read once. Weights in
    `factors` are multiplied by their factor. With `ema`, trained weights are read from their moving averages; raises
    ConfigError if the checkpoint has none.
    """

    def __init__(self, checkpoint: Path, factors: dict[str, float] | None = None, ema: bool = False):
        """Read the index. `averages` gives for each parameter the stored name of its moving average."""
        self.checkpoint, self.reader = checkpoint, safe.SafeReader(checkpoint)
        self.factors = factors or {}
        self.metadata = self.reader.index
        stored = map(EMA.fullmatch, self.metadata.state_dict_metadata if ema else ())
        self.averages = {match[1]: match[0] for match in stored if match}
        if ema and not self.averages:
            raise ConfigError(f"--ema: {checkpoint} has no averages of weights; its run had optimizer.ema_decay=0")

    def dtypes(self, state: dict[str, Tensor]) -> dict[str, torch.dtype]:
        """Return the dtype in which each tensor of a model is stored. Missing tensors are left out."""
        stored = self.metadata.state_dict_metadata
        return {
            name: entry.properties.dtype
            for name in state
            if isinstance(entry := stored.get(PREFIX + name), TensorStorageMetadata)
        }

    def tensor(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Read a whole parameter, whose shards any number of ranks may have written, and convert it to `dtype`."""
        factor, key = self.factors.get(name, 1.0), self.averages.get(name, PREFIX + name)
        state = {key: torch.empty(shape, dtype=dtype if factor == 1 else torch.float32)}
        try:
            dcp.load(state, storage_reader=self.reader, planner=LoadPlanner(), no_dist=True)
        except (dcp.CheckpointException, RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.checkpoint}: {key} cannot be read; the checkpoint is damaged") from error
        return state[key] if factor == 1 else (state[key] * factor).to(dtype)


class Merged:
    """Reads weights with the products of their adapters added, in float32: w + factor * B A."""

    def __init__(self, base: Reader | Folder, adapters: Reader, factor: float):
        self.base, self.adapters, self.factor = base, adapters, factor
        self.dtypes = base.dtypes
        stored = adapters.metadata.state_dict_metadata
        # buffers, which training may have changed, such as a router's bias
        self.changed = {
            name.removeprefix(PREFIX) for name in stored if name.startswith(PREFIX) and ".lora_" not in name
        }

    def adapter(self, weight: str) -> dict[str, Tensor]:
        """Return the matrices lora_a and lora_b of a weight's adapter; {} if it has none. Those of a stack of experts are
        stacked too, and have the name of the stack at their end.
        """
        (owner, _, leaf), stored = weight.rpartition("."), self.adapters.metadata.state_dict_metadata
        tail = "" if leaf == "weight" else f"_{leaf}"
        return {
            part: self.adapters.tensor(f"{owner}.{part}{tail}", entry.size, torch.float32)
            for part in ("lora_a", "lora_b")
            if isinstance(entry := stored.get(f"{PREFIX}{owner}.{part}{tail}"), TensorStorageMetadata)
        }

    def tensor(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Read a whole parameter, merge it, and convert it to `dtype`."""
        if name in self.changed:
            return self.adapters.tensor(name, shape, dtype)
        weight, lora = self.base.tensor(name, shape, torch.float32), self.adapter(name)
        if lora:
            add = weight.addmm_ if weight.dim() == 2 else weight.baddbmm_
            add(lora["lora_b"], lora["lora_a"], alpha=self.factor)
        return weight.to(dtype)

    def both(self, name: str, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Read a buffer as it was before the training, and as it is after it."""
        return self.base.tensor(name, shape, torch.float32), self.adapters.tensor(name, shape, torch.float32)
