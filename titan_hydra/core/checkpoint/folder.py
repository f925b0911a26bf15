"""Read the tensors of a model, or any part of a tensor, from a Hugging Face folder (safetensors); load the initial
weights of a new run from one, slice by slice, into this rank's shards.

A folder may store a tensor of the model in pieces, or as a part of a larger tensor (core/models/hf.py). Weights
in float8 are multiplied by the scales of their blocks, which are separate tensors of the folder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.family import FAMILIES
from titan_hydra.core.job.config.fault import shown
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.kernels.split_masters import halve_into
from titan_hydra.core.models.hf import HuggingFace, hf_of, meta_state, typed_model
from titan_hydra.core.models.init import local_box
from titan_hydra.core.parallel.mesh import local_part

from .state import lower_halves, weights

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
ROWS = 4096  # number of rows of a matrix that are compared at a time
SCALE = "_scale_inv"  # suffix of the tensor with a float8 weight's scales
UNUSED = ("rotary_emb.inv_freq", SCALE)  # suffixes of tensors in a folder that are not weights


class Folder:
    """The weights of a Hugging Face folder, and the model that its config.json describes. `hf` is the family's
    HuggingFace record; by default, it is chosen by the model_type in config.json. Raises ConfigError if the folder
    cannot be read.

    The record says in which pieces the folder stores a tensor of the model, such as a matrix of all experts.
    """

    def __init__(self, source: Path, hf: HuggingFace | None = None):
        """Read config.json and the index of the weights; the weights themselves are read on demand."""
        self.source, self.handles = source, {}
        if (adapters := source / "adapter_config.json").exists():
            raise ConfigError(f"{adapters}: adapters cannot be converted; merge them into the weights first, with PEFT")
        config_file = source / "config.json"
        content = content_of(config_file)
        self.hf = hf or side_of(content, config_file)
        try:
            self.config: Model = typed_model(self.hf.from_config(content, config_file), config_file)
        except KeyError as error:
            raise ConfigError(f"{config_file}: lacks {error}") from error
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"{config_file}: has a value of another type than its key takes ({error})") from error
        self.hf = self.hf.of(self.config)
        # Blocks of multi-token prediction, which a model may lack, are numbered after the model's blocks.
        layers = self.config.n_layers
        self.unused = tuple(
            f"model.layers.{layers + number}." for number in range(content.get("num_nextn_predict_layers") or 0)
        )
        self.block = block_of(content.get("quantization_config"), config_file)
        self.files = weight_files(source, self.hf.files)
        # Hugging Face's library names these blocks in config.json, but does not save them.
        if self.config.predictions > 1 and not any(name.startswith(self.unused) for name in self.files):
            self.config = replace(self.config, mtp=0)  # type: ignore[call-arg]  # a key of families that have them

    def dtypes(self, state: dict[str, Tensor]) -> dict[str, torch.dtype]:
        """Return the dtype in which each tensor of a model is stored; bfloat16 for float8. Raises ConfigError if a tensor
        is missing or has another shape, or if the folder has weights that the model lacks.
        """
        dtypes, seen = {}, set()
        for fqn, tensor in state.items():
            wanted = self.shapes(fqn, tensor.shape)
            # buffers may be missing: they keep their initial values
            if isinstance(tensor, nn.Parameter) or wanted.keys() <= self.files.keys():
                dtypes[fqn], *_ = (self._checked(name, shape) for name, shape in wanted.items())
                seen |= wanted.keys()
        head = f"{self.hf.names.get('output')}.weight" if self.config.tie_embeddings else ""
        if head in self.files and not self._equal(head, self.hf.name("tok_embeddings.weight")):
            raise ConfigError(
                f"{self.files[head]}: {head} differs from the embedding, and tie_word_embeddings=true in config.json says "
                "that they are one; nearest legal: tie_word_embeddings=false"
            )
        for name in self.files.keys() - seen - {head}:
            if not name.startswith(self.unused) and not name.endswith(UNUSED):
                raise ConfigError(f"{self.files[name]}: {name} has no place in the model")
        return dtypes

    def _equal(self, first: str, second: str) -> bool:
        """Whether two tensors have the same values. They are read in pieces, as they can be large."""
        shape, others = self._entry(first).get_shape(), self._entry(second).get_shape()
        return shape == others and all(
            torch.equal(
                *(self._part(name, (row, 0), (min(ROWS, shape[0] - row), shape[1])) for name in (first, second))
            )
            for row in range(0, shape[0], ROWS)
        )

    def shapes(self, fqn: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return name and shape of each tensor in the folder that contains the model's tensor `fqn` or a part of this
        tensor.
        """
        return {piece.name: piece.shape for piece in self.hf.pieces(fqn, shape, self.files)}

    def tensor(self, fqn: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """Read a whole tensor and convert it to `dtype`. Raises ConfigError if it is missing or has another shape."""
        for name, part in self.shapes(fqn, shape).items():
            self._checked(name, part)
        whole = torch.empty(shape, dtype=dtype)
        self.read(fqn, shape, [0] * len(shape), whole)
        return whole

    def read(self, fqn: str, shape: Sequence[int], offsets: Sequence[int], target: Tensor) -> None:
        """Read a part of the tensor `fqn` into `target`. The part begins at `offsets` and has the shape of `target`;
        `shape` is that of the whole tensor.
        """
        if target.numel() == 0:
            return
        for piece in self.hf.pieces(fqn, shape, self.files):
            ends = [offset + size for offset, size in zip(offsets, target.shape, strict=True)]
            both = [
                slice(max(box.start, start), min(box.stop, end))
                for box, start, end in zip(piece.box, offsets, ends, strict=True)
            ]
            if any(part.start >= part.stop for part in both):
                continue
            target_part = target[
                tuple(slice(part.start - at, part.stop - at) for part, at in zip(both, offsets, strict=True))
            ]
            inside = [part.start - box.start for part, box in zip(both, piece.box, strict=True)][-len(piece.start) :]
            where = [start + offset for start, offset in zip(piece.start, inside, strict=True)]
            target_part.copy_(
                self._part(piece.name, where, target_part.shape[-len(where) :]).reshape(target_part.shape)
            )
            if not target_part.isfinite().all():
                raise ConfigError(
                    f"{self.files[piece.name]}: {piece.name} has values in {str(target_part.dtype).removeprefix('torch.')} that are "
                    "not finite: the file is damaged, or the dtype too small"
                )

    def _part(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """Read the box of a tensor that begins at `offsets`. A float8 tensor is multiplied by its scales, of which each
        belongs to a block of the tensor, also where the box cuts a block.
        """
        where = tuple(slice(start, start + size) for start, size in zip(offsets, sizes, strict=True))
        values = self._open(name).get_slice(name)[where]
        if values.dtype != torch.float8_e4m3fn:
            return values
        blocks = (1,) * (values.dim() - 2) + self.block
        over = tuple(
            slice(part.start // block, -(-part.stop // block)) for part, block in zip(where, blocks, strict=True)
        )
        scales = self._open(name + SCALE).get_slice(name + SCALE)[over].float()
        for dim, block in enumerate(blocks):
            scales = scales.repeat_interleave(block, dim).narrow(dim, offsets[dim] % block, sizes[dim])
        return values.float() * scales

    def _checked(self, name: str, shape: tuple[int, ...]) -> torch.dtype:
        """Return a tensor's dtype; bfloat16 for float8. Raises ConfigError for a missing tensor, or a wrong shape."""
        entry = self._entry(name)
        if (shape_here := tuple(entry.get_shape())) != shape:
            raise ConfigError(f"{self.files[name]}: {name} is {shape_here}; the model needs {shape}")
        if (stored := entry.get_dtype()) in DTYPES:
            return DTYPES[stored]
        if stored != "F8_E4M3" or self.block is None:
            raise ConfigError(
                f"{self.files[name]}: {name} is {stored}; legal: {', '.join(DTYPES)}, or F8_E4M3 with quantization_config.weight_block_size"
            )
        blocks = (1,) * (len(shape) - 2) + self.block
        needed = tuple(-(-size // block) for size, block in zip(shape, blocks, strict=True))
        if (shape_here := tuple(self._entry(name + SCALE).get_shape())) != needed:
            raise ConfigError(f"{self.files[name + SCALE]}: {name + SCALE} is {shape_here}; the weight needs {needed}")
        return torch.bfloat16

    def _entry(self, name: str) -> Any:
        if name not in self.files:
            raise ConfigError(f"{self.source}: has no {name}, which the model needs")
        try:
            return self._open(name).get_slice(name)
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{self.files[name]}: {name} cannot be read ({error})") from error

    def _open(self, name: str) -> Any:
        """Return the open file of a tensor. Each file is opened once, as a model may have tens of thousands of tensors."""
        file = self.files[name]
        if file not in self.handles:
            self.handles[file] = safe_open(file, framework="pt")
        return self.handles[file]


def side_of(content: dict, file: Path) -> HuggingFace:
    """Return the HuggingFace record of the family whose model a config.json describes. Raises ConfigError if its
    model_type belongs to no family.
    """
    sides = {side.model_type: side for family in FAMILIES.values() if (side := family.part("hf"))}
    kind = content.get("model_type") or content.get("_class_name")
    if kind not in sides:
        raise ConfigError(
            f"{file}: model_type={kind}: only {', '.join(sides)} can be converted; --imports names a module of your own "
            "that defines another family"
        )
    return sides[kind]


def block_of(quantization: dict | None, file: Path) -> tuple[int, ...] | None:
    """Return (rows, columns) of the blocks into which float8 weights are divided, with one scale for each block. None
    if weights are not quantized. Raises ConfigError for other quantizations.
    """
    if not quantization:
        return None
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if method != "fp8" or not block:
        raise ConfigError(
            f"{file}: quantization_config.quant_method={method}, weight_block_size={block}: only fp8 in blocks can be converted"
        )
    return tuple(block)


def weight_files(source: Path, stem: str) -> dict[str, Path]:
    """Return for each tensor the file in a folder that holds it. The names of weight files begin with `stem`."""
    index = source / f"{stem}.safetensors.index.json"
    single = source / f"{stem}.safetensors"
    if index.is_file():
        file_names = content_of(index).get("weight_map")
        if not isinstance(file_names, dict) or not all(isinstance(file, str) for file in file_names.values()):
            raise ConfigError(f"{index}: weight_map={shown(str(file_names))}: must name the file of each tensor")
        files = {name: source / file for name, file in file_names.items()}
        if single.exists() and single not in files.values():
            raise ConfigError(
                f"{source}: has {single.name} and {index.name}, which names other files: which are the weights? Move one of them away"
            )
        return files
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{single}: cannot be read, and there is no {index.name} ({error})") from error


def content_of(file: Path) -> dict[str, Any]:
    """Return the content of a JSON file. Raises ConfigError if it cannot be read, or holds no JSON object."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a JSON object")
    return content


def write_content(file: Path, content: dict) -> None:
    """Write a JSON file as Hugging Face's libraries do: indented, with the keys in the order of `content`."""
    file.write_text(json.dumps(content, indent=2) + "\n")


@torch.no_grad()
def load_hf(model: nn.Module, config: Model, source: Path) -> None:
    """Read this rank's slices of the weights in a Hugging Face folder into the model's shards, one tensor at a time."""
    try:
        folder, there = folder_for(config, source)
    except ConfigError as error:
        raise ConfigError(f"checkpoint.initial_load_path={source}: {error}") from error
    lower = lower_halves(model)
    for name, tensor in weights(model).items():
        if name in there:
            held = local_part(tensor)
            whole = torch.empty_like(held, dtype=torch.float32, device="cpu") if name in lower else held
            folder.read(name, tensor.shape, local_box(tensor)[0], whole)
            if name in lower:
                halve_into(whole, held, lower[name])


def folder_for(config: Model, source: Path) -> tuple[Folder, dict[str, torch.dtype]]:
    """Return the folder from which a model takes its weights, and the dtypes of its tensors. Raises ConfigError if the
    folder's tensors or its config.json are of another model.
    """
    folder = Folder(source, hf_of(config))
    _check_arithmetic(config, folder.config)
    return folder, folder.dtypes(meta_state(config))


def _check_arithmetic(ours: Model, theirs: Model) -> None:
    """Raise ConfigError if the two models have the same shapes but compute differently (RoPE, norms)."""
    there = theirs.arithmetic()
    for key, value in ours.arithmetic().items():
        if value != there[key]:
            raise ConfigError(f"model.{key} is {value} here and {there[key]} there")
