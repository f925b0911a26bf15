"""Convert a checkpoint to a Hugging Face folder (safetensors), or such a folder to a checkpoint that training can start from.

Both directions stream: an export holds one file's tensors in memory, an import one tensor. The file that marks completeness is written last
(config.json of an export, `.metadata` of a checkpoint), so an interrupted folder is never taken for a complete one.
"""
from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from titan_hydra.base.errors import ConfigError
from titan_hydra.config import from_dict, to_dict
from titan_hydra.config.family import families
from titan_hydra.config.files import read_json
from titan_hydra.config.schema import Model, Source, Tokenizer
from titan_hydra.config.user_code import require_user_modules
from titan_hydra.models.hf import HuggingFace, hf_of, parameter_shapes
from titan_hydra.runs import layout
from titan_hydra.runs.checkpoints import newest

from . import initial
from .reader import PREFIX, HuggingFaceReader, Merged, Reader, weight_files
from .tokenizer import write_tokenizer

if TYPE_CHECKING:
    from titan_hydra.data.template import Template

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def export_hf(source: Path, target: Path, dtype: torch.dtype, max_shard_gb: float = 5.0, config_file: Path | None = None) -> list[str]:
    """Write the model of a checkpoint or run in its family's Hugging Face format. Returns the names of the weight files."""
    checkpoint = find_checkpoint(source)
    config = read_model_config(checkpoint, config_file)
    hf, shapes = hf_of(config), parameter_shapes(config)
    reader = reader_of(checkpoint, config_file)
    if isinstance(reader, Reader):
        _check_stored(reader.metadata, shapes, checkpoint)
    shards = _plan_shards({name: shape.numel() * dtype.itemsize for name, shape in shapes.items()}, max_shard_gb * 1e9)
    make_target(target)
    files = [_shard_name(i, len(shards)) for i in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        tensors = {hf.name(name): reader.tensor(name, shapes[name], dtype) for name in names}
        (target / file).touch()
        mode = (target / file).stat().st_mode  # the umask's; safetensors would make the file readable only to its owner
        save_file(tensors, target / file, metadata={"format": "pt"})
        (target / file).chmod(mode)
    if len(files) > 1:
        weight_map = {hf.name(name): file for file, names in zip(files, shards, strict=True) for name in names}
        total = sum(shape.numel() for shape in shapes.values()) * dtype.itemsize
        _write_json(target / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    ids = _export_tokenizer(checkpoint, config_file, target, config.max_seq_len)
    _write_json(target / "config.json", hf.to_config(config, dtype) | ids)
    return files


def _export_tokenizer(checkpoint: Path, config_file: Path | None, target: Path, max_length: int) -> dict[str, int | None]:
    """Write the run's tokenizer and generation_config.json. Returns the token ids; without a tokenizer {}, and prints a warning."""
    try:
        ids = write_tokenizer(read_tokenizer_config(checkpoint, config_file), target, max_length)
        if find_section("train", checkpoint, config_file)[1].get("objective") == "sft":
            (target / "chat_template.jinja").write_text(read_template(checkpoint, config_file).source)
    except ConfigError as error:
        print(f"warning: {error}; the export has no tokenizer", file=sys.stderr)
        return {}
    _write_json(target / "generation_config.json", ids | {"pad_token_id": ids["eos_token_id"]})
    return ids


def import_hf(source: Path, target: Path, dtype: torch.dtype | None = None, imports: Sequence[str] = ()) -> None:
    """Write a Hugging Face folder as a checkpoint of `model.*` only, with the model section as its config.json; `imports` are the user's
    modules, which may bring the family.
    """
    require_user_modules(list(imports))
    if not source.is_dir():
        raise ConfigError(f"{source}: no such folder")
    config_file = source / "config.json"
    try:
        content = _read_json(config_file)
        hf = side_of(content, config_file)
        config = hf.from_config(content, config_file)
    except KeyError as error:
        raise ConfigError(f"{config_file}: lacks {error}") from error
    shapes = parameter_shapes(config)
    files = weight_files(source)
    state = {PREFIX + name: _meta_tensor(hf.name(name), shape, dtype, files, source) for name, shape in shapes.items()}

    def read(key: str) -> Tensor:
        name = hf.name(key.removeprefix(PREFIX))
        with safe_open(files[name], framework="pt") as file:
            return file.get_tensor(name).to(state[key].dtype)

    make_target(target)
    words = source / "tokenizer.json"
    tokenizer = {"tokenizer": {"name": "hf", "path": str(words.absolute())}} if words.is_file() else {}
    _write_json(target / "config.json", {"model": to_dict(config), "train": {"imports": list(imports)}} | tokenizer)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(target), planner=LazySavePlanner(read), no_dist=True)


def side_of(content: dict, file: Path) -> HuggingFace:
    """Return the Hugging Face side of the family whose models a config.json describes. Raises ConfigError if no family has it."""
    sides = [side for family in families().values() if (side := family.part("hf"))]
    kind = content.get("model_type")
    found = next((side for side in sides if side.model_type == kind), None)
    if found is None:
        raise ConfigError(f"{file}: model_type={kind}: only {', '.join(side.model_type for side in sides)} can be converted")
    return found


def find_checkpoint(source: Path) -> Path:
    """Return `source` if it is a complete checkpoint, else the newest of that run (or checkpoints folder). Raises ConfigError."""
    if not source.is_dir():
        raise ConfigError(f"{source}: no such folder")
    if (source / ".metadata").is_file():
        return source
    step = newest(layout.CHECKPOINTS.of(source)) or newest(source)
    if step is None:
        raise ConfigError(f"{source}: not a complete checkpoint (it has no .metadata), and no run with one in checkpoints/step-*")
    return step


def read_model_config(checkpoint: Path, config_file: Path | None = None) -> Model:
    """Read the model section of the config.json in the checkpoint (an imported one) or two folders above it (a run's), and import the
    modules that its family may come from.
    """
    candidates = [config_file] if config_file else [layout.CONFIG.of(folder) for folder in (checkpoint, checkpoint.absolute().parents[1])]
    file = next((file for file in candidates if file.is_file()), None)
    if file is None:
        raise ConfigError(f"{candidates[-1]}: no such file; name the run's config.json with --config")
    try:
        content = _read_json(file)
        require_user_modules(content.get("train", {}).get("imports", []))
        return from_dict(Model, content["model"])
    except (KeyError, TypeError) as error:
        raise ConfigError(f"{file}: not the config.json of a run ({error})") from error


def read_tokenizer_config(checkpoint: Path, config_file: Path | None = None) -> Tokenizer:
    """Read the tokenizer section of the run that wrote a checkpoint. Its path is resolved against the folder in which the run was started.

    Raises ConfigError if no config.json names a tokenizer.
    """
    file, section = find_section("tokenizer", checkpoint, config_file)
    if not section:
        raise ConfigError(f"{file}: names no tokenizer")
    config = from_dict(Tokenizer, section)
    if config.path:
        config.path = _as_started(file, config.path)
    return config


def _as_started(config_file: Path, path: str) -> str:
    """Resolve a path of a run's configuration against the folder in which the run was started."""
    started = layout.ENV.read(config_file.parent).get("folder", "")
    return str(Path(started, Path(path).expanduser()))


def reader_of(checkpoint: Path, config_file: Path | None = None) -> Reader | Merged:
    """Return what reads the weights of a checkpoint; adapters are merged into the weights that the run has started from."""
    _, adapter = find_section("adapter", checkpoint, config_file)
    if adapter.get("name", "none") == "none":
        return Reader(checkpoint)
    file, section = find_section("checkpoint", checkpoint, config_file)
    if not section.get("initial_load_path"):
        raise ConfigError(f"{file}: checkpoint.initial_load_path=null: the adapters stand beside weights that were drawn and not kept")
    base = initial.find(_as_started(file, section["initial_load_path"]))
    beside = HuggingFaceReader(base, hf_of(read_model_config(checkpoint, config_file))) if initial.is_hf(base) else Reader(base)
    return Merged(beside, Reader(checkpoint), adapter["alpha"] / adapter["rank"])


def read_template(checkpoint: Path, config_file: Path | None = None) -> Template:
    """Load the chat template of the run that wrote a checkpoint. Raises ConfigError if there is none."""
    from titan_hydra.data import template

    _, section = find_section("data", checkpoint, config_file)
    source = Source(name="chat", chat_template=section.get("chat_template"))
    return template.load_template("data", source, read_tokenizer_config(checkpoint, config_file))


def find_section(name: str, checkpoint: Path, config_file: Path | None = None) -> tuple[Path, dict]:
    """Return a section of config.json and the file that has it; {} if no file has it.

    Searched are `config_file` if given, else the config.json beside the checkpoint (an import), one folder up (the run of an export) and
    two folders up (the run of a step).
    """
    folders = [checkpoint, *checkpoint.absolute().parents[:2]]
    candidates = [config_file] if config_file else [layout.CONFIG.of(folder) for folder in folders]
    found = ((file, (read_json(file) or {}).get(name)) for file in candidates)
    return next(((file, section) for file, section in found if section), (candidates[-1], {}))


class LazySavePlanner(dcp.DefaultSavePlanner):
    """Saves a state dict of meta tensors; `read(key)` supplies each real tensor when it is written."""

    def __init__(self, read: Callable[[str], Tensor]):
        super().__init__()
        self.read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.read(index.fqn)


def _check_stored(metadata: Metadata, shapes: dict[str, torch.Size], checkpoint: Path) -> None:
    stored = {key.removeprefix(PREFIX): entry.size for key, entry in metadata.state_dict_metadata.items()
              if key.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)}
    for name in shapes | stored:
        if shapes.get(name) != stored.get(name):
            has, needs = (tuple(found[name]) if name in found else "nothing" for found in (stored, shapes))
            raise ConfigError(f"{checkpoint}: {PREFIX}{name} is {has}, but the model of its config.json has {needs} there")


def _plan_shards(sizes: dict[str, int], limit: float) -> list[list[str]]:
    """Assign names to files, in order; a file exceeds `limit` bytes only if a single tensor does."""
    shards, used = [[]], 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _shard_name(index: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def _meta_tensor(theirs: str, shape: torch.Size, dtype: torch.dtype | None, files: dict[str, Path], source: Path) -> Tensor:
    """Return a meta tensor of a checkpoint's shape and dtype. Raises ConfigError if the folder holds something else."""
    if theirs not in files:
        raise ConfigError(f"{source}: has no {theirs}, which its config.json asks for")
    try:
        with safe_open(files[theirs], framework="pt") as file:
            entry = file.get_slice(theirs)
            found, stored = tuple(entry.get_shape()), entry.get_dtype()
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{files[theirs]}: {theirs} cannot be read ({error})") from error
    if found != tuple(shape):
        raise ConfigError(f"{files[theirs]}: {theirs} is {found}; config.json asks for {tuple(shape)}")
    dtypes = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
    if stored not in dtypes:
        raise ConfigError(f"{files[theirs]}: {theirs} is {stored}; legal: {', '.join(dtypes)}")
    return torch.empty(shape, dtype=dtype or dtypes[stored], device="meta")


def make_target(target: Path) -> None:
    """Make a folder to export to. Raises ConfigError if it holds anything or cannot be written."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        occupied = any(target.iterdir())
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror})") from error
    if occupied:
        raise ConfigError(f"{target}: exists and is not empty; name a new folder")
    if not os.access(target, os.W_OK):
        raise ConfigError(f"{target}: cannot be written (permission denied)")


def _read_json(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error})") from error


def _write_json(file: Path, data: dict) -> None:
    file.write_text(json.dumps(data, indent=2) + "\n")
