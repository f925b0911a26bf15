"""The contents of a checkpoint: `model.*` and `optimizer.*` as DCP shards, which any layout can load, and for each rank a
file `rank_R.json` with the states of its data streams and its random generators.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from titan_hydra.core.base.errors import CheckpointError
from titan_hydra.core.data.loader import merge
from titan_hydra.core.models.init import clean_name
from titan_hydra.core.parallel import formats
from titan_hydra.core.parallel.split_masters import is_split, lower_half

from .planner import CHANGED

# optimizer state is stored under parameter names, so that any layout can load it
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)
GROUPS = "param_groups."  # how the names of all options of parameter groups begin in torch's flat state
Optimizers = list[torch.optim.Optimizer]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's shards of the parameters, without copying them. For split masters, return the upper halves."""
    held: dict[str, Any] = get_model_state_dict(model)
    return {name: formats.plain(weight) for name, weight in held.items()}


def lower_halves(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return this rank's lower halves of split masters, without copying them."""
    return {
        clean_name(name): lower_half(parameter) for name, parameter in model.named_parameters() if is_split(parameter)
    }


def of_optimizers(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return this rank's shards of the optimizers' state, and the options of parameter groups that steps have changed.
    All other options (decay, betas, rates) come from the configuration of the job that trains, and are not saved.
    """
    held = get_optimizer_state_dict(model, optimizers, options=OPTIONS)
    return {name: value for name, value in held.items() if not name.startswith(GROUPS)} | {
        name: value for name, value, first in _options(model, optimizers) if not _equal(value, first)
    }


def changeable(model: nn.Module, optimizers: Optimizers) -> dict[str, Any]:
    """Return the options of parameter groups that a checkpoint may have, with their present values. An optimizer of the
    user's may have a part of its state there: a count of steps, or an estimate of the rate.
    """
    return {name: value for name, value, _ in _options(model, optimizers)}


def into_optimizers(model: nn.Module, optimizers: Optimizers, state: dict[str, Any]) -> None:
    """Load the optimizers' state. Options of parameter groups keep the values of this job, except those in `state`."""
    held = get_optimizer_state_dict(model, optimizers, options=OPTIONS)
    changed = {GROUPS + name.removeprefix(CHANGED): value for name, value in state.items() if name.startswith(CHANGED)}
    set_optimizer_state_dict(model, optimizers, held | state | changed, options=OPTIONS)


def _options(model: nn.Module, optimizers: Optimizers) -> Iterator[tuple[str, Any, Any]]:
    """Yield for each trained parameter and option of its group: the name in a checkpoint, the value, and the value that
    the option was built with.
    """
    names = {parameter: clean_name(name) for name, parameter in model.named_parameters()}
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        options = [option for option in group if option not in ("params", "lr", "peak_lr", "built")]
        for parameter in group["params"]:
            for option in options:
                yield f"{CHANGED}{names[parameter]}.{option}", group[option], group["built"].get(option)


def _equal(first: Any, second: Any) -> bool:
    are_tensors = isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)
    return torch.equal(first, second) if are_tensors else first is second or bool(first == second)


def of_rank(world_size: int, data: dict[str, Any]) -> str:
    """Return the content of rank_R.json: the state of the rank's data streams, and of its random generators."""
    random = {"cpu": _encode(torch.get_rng_state())}
    if torch.cuda.is_available():
        random["cuda"] = _encode(torch.cuda.get_rng_state())
    return json.dumps({"world_size": world_size, "random": random, "data": data})


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.json"


def restore_rank(path: Path, rank: int, world_size: int) -> dict[str, Any]:
    """Return the merged data states of all ranks. Also restore this rank's random generators, if the run has as many ranks
    as the checkpoint.
    """
    states = [json.loads(file.read_text()) for file in sorted(path.glob(f"rank_{'[0-9]' * 5}.json"))]
    if not states:
        raise CheckpointError(f"{path} has no rank_*.json: no state of the data to continue from")
    if len(states) == world_size:
        random = states[rank]["random"]
        torch.set_rng_state(_decode(random["cpu"]))
        if "cuda" in random and torch.cuda.is_available():
            torch.cuda.set_rng_state(_decode(random["cuda"]))
    return merge([state["data"] for state in states])


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
