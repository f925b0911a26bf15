"""A model of transformers in its own format: the names of its tensors are transformers' own, and so is its config.json."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.folder import folder_for
from titan_hydra.core.job.config import from_dict, to_dict
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.run.checkpoints import is_hf
from titan_hydra.core.models.hf import HuggingFace, StoredPart

from .config import OWN_NAMES, SHARED, TransformersConfig, contents_of
from .known import library_config
from .model import Transformers


@dataclass(frozen=True)
class OwnFormat(HuggingFace):
    """`names` has transformers' names of the model's children, for one model. `library` is that model on the meta device;
    `own_names` says whether exports have the names that it has in memory. By default they have the names that
    transformers saves, which are those of the hub.
    """

    library: Any = None
    own_names: bool = False

    def of(self, config: TransformersConfig) -> HuggingFace:
        with torch.device("meta"):
            model = Transformers(config, 1)
        own_names = bool(json.loads(config.beside or "{}").get(OWN_NAMES))
        return replace(self, names=model.names, library=model.whole[0], own_names=own_names)

    def name(self, fqn: str) -> str:
        child, _, rest = fqn.partition(".")
        return f"{self.names[child]}.{rest}"

    def pieces(self, fqn: str, shape: Sequence[int], there: Collection[str] = ()) -> list[StoredPart]:
        """Return the pieces of a tensor: itself, if the folder has its name in memory, else what transformers saves."""
        if self.name(fqn) in there or (self.own_names and not there):
            return super().pieces(fqn, shape)
        return saved_pieces(self.library, self.name(fqn), shape)


def saved_pieces(library: Any, name: str, shape: Sequence[int]) -> list[StoredPart]:
    """Return the tensors that transformers makes of a parameter or buffer when it saves a model. Raises ConfigError for a
    tensor that is more than a box of its rows, such as one with permuted heads.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist, revert_weight_conversion

    dims = {type(operation): getattr(operation, "dim", None) for operation in operations_of(library, name)}
    merged, joined = dims.pop(MergeModulelist, None), dims.pop(Concatenate, None)
    if dims or merged:
        other = next(iter(dims), MergeModulelist)
        raise ConfigError(
            f"{other.__name__} makes {name} of a {type(library).__name__} from a folder's tensors; nearest "
            "legal: a folder that transformers has saved with save_original_format=False"
        )
    saved = revert_weight_conversion(library, {name: torch.empty(shape, device="meta")})
    experts = 1 if merged is None else shape[0]
    number = len(saved) // experts  # of the tensors that are joined into one for each expert
    pieces = []
    for position, (stored_name, part) in enumerate(saved.items()):
        box = [slice(0, size) for size in shape]
        source, expert = divmod(position, experts)
        if merged is not None:
            box[0] = slice(expert, expert + 1)
        if joined is not None:
            size = shape[joined] // number
            box[joined] = slice(source * size, (source + 1) * size)
        pieces.append(StoredPart(stored_name, tuple(part.shape), tuple(box), (0,) * part.dim()))
    return pieces


def operations_of(library: Any, name: str) -> list[Any]:
    """Return the operations by which transformers makes a tensor of the model from tensors of a folder when it loads
    them; none for a tensor that is only renamed.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    for converter in get_model_conversion_mapping(library, add_legacy=False):
        if isinstance(converter, WeightConverter) and converter.reverse_transform().rename_source_key(name)[1]:
            return list(converter.operations)
    return []


def to_config(config: TransformersConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Return the config.json of the run's folder, without token ids. Keys of the model replace its values."""
    theirs, original = library_config(config), json.loads(config.content)
    plain = library_config(replace(config, **dict.fromkeys(SHARED)))
    beside = json.loads(config.beside or "{}")
    content = original | {
        name: getattr(theirs, name)
        for name in SHARED.values()
        if name in original or getattr(theirs, name, None) != getattr(plain, name, None)
    }
    if "layer_types" in original:
        content["layer_types"] = list(theirs.layer_types)
    kinds = {
        "architectures": beside.get("architectures") or [architecture_of(theirs.model_type)],
        "torch_dtype" if "torch_dtype" in beside else "dtype": str(dtype).removeprefix("torch."),
    }
    return {name: value for name, value in beside.items() if name != OWN_NAMES} | content | kinds


def architecture_of(model_type: str) -> str:
    """Return the name of transformers' class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]


def from_config(data: dict[str, Any], file: Path) -> TransformersConfig:
    """Return the model section for a config.json."""
    content, beside = contents_of(data, file.parent)
    return TransformersConfig(
        name=file.parent.name, family="transformers", path=str(file.parent), content=content, beside=beside
    ).frozen()


HF = OwnFormat("", {}, to_config, from_config)


def weights_faults(job: Any) -> Iterator[Fault]:
    """Yield a fault if the folder of initial weights does not have the model's tensors. Only names and shapes are read."""
    path = job.checkpoint.initial_load_path
    if path and is_hf(source := Path(path).expanduser()):
        files = sorted(source.glob("*.safetensors*"))
        stamp = [(file.name, file.stat().st_mtime_ns) for file in [source / "config.json", *files] if file.exists()]
        if reason := _objection(json.dumps(to_dict(job.model)), source.absolute(), str(stamp)):
            yield Fault("checkpoint.initial_load_path", path, reason)


@lru_cache(maxsize=16)
def _objection(model: str, source: Path, stamp: str) -> str | None:
    """Return why a model cannot take its weights from a folder; None if it can. `stamp` changes with the folder's files."""
    try:
        folder_for(from_dict(Model, json.loads(model)), source)
    except ConfigError as error:
        return str(error)
    return None
