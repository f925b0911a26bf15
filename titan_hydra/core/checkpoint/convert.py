"""Convert a checkpoint to a Hugging Face folder (safetensors), or such a folder to a checkpoint that training can start
from; or the adapters alone to the two files of Hugging Face's PEFT.

An export holds the tensors of one file in memory at a time. An import holds one tensor at a time; a matrix of all
experts of a block counts as one tensor. An export writes its config.json last, and an import its `.metadata`; a folder
without that file counts as incomplete, so an interrupted conversion is never taken for a complete one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.facts import Facts
from titan_hydra.core.job.config import from_dict, to_dict
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.load import give_types
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.schema import Parametrization
from titan_hydra.core.job.config.user_code import require_user_modules
from titan_hydra.core.job.parametrization import Rules, rules_of
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.checkpoints import (
    as_started,
    complete_at,
    config_files,
    find_checkpoint,
    find_section,
    holds_adapters,
    is_hf,
)
from titan_hydra.core.job.run.inputs import initial_weights
from titan_hydra.core.models.hf import folded, hf_of, in_dtype, meta_state

from .carried import facts_at, with_tokenizer
from .folder import Folder, content_of, write_content
from .reader import PREFIX, Merged, Reader
from .tokenizer import write_facts

HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux's renameat2
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def export_hf(
    source: Path,
    target: Path,
    dtype: torch.dtype | None = None,
    max_shard_gb: float = 5.0,
    config_file: Path | None = None,
    tokenizer_file: Path | None = None,
    ema: bool = False,
) -> tuple[list[str], torch.dtype]:
    """Write the model of a checkpoint or run in its family's Hugging Face format. Tensors are converted to `dtype`;
    None: they keep their dtypes. Return the names of the weight files, and the dtype that most tensors have.
    `tokenizer_file` is the tokenizer's file, if the user has named one. With `ema`, write the averages of the weights.
    """
    checkpoint = find_checkpoint(source)
    config = read_model_config(checkpoint, config_file)
    hf, state = hf_of(config), meta_state(config)
    reader = reader_of(checkpoint, config_file, ema)
    if isinstance(reader, Reader):
        _check_stored(reader.metadata, {name: tensor.shape for name, tensor in state.items()}, checkpoint)
    stored = {} if dtype else reader.dtypes(state)
    dtypes = {name: in_dtype(tensor, dtype or stored.get(name)) for name, tensor in state.items()}
    common = dtype or Counter(dtypes.values()).most_common(1)[0][0]
    content = hf.to_config(config, common)
    sizes = {name: tensor.numel() * dtypes[name].itemsize for name, tensor in state.items()}
    takes_text = family_of(config).takes == "tokens"
    facts = facts_at(checkpoint, config_file) if takes_text else Facts()
    if tokenizer_file and takes_text:
        facts = with_tokenizer(facts, tokenizer_file)
    shards = _plan_shards(sizes, max_shard_gb * 1e9)
    make_target(target)
    files = [_shard_name(hf.files, i, len(shards)) for i in range(len(shards))]
    weight_map: dict[str, str] = {}
    for file, names in zip(files, shards, strict=True):
        tensors: dict[str, Tensor] = {}
        for name in names:
            tensors |= hf.parts(name, reader.tensor(name, state[name].shape, dtypes[name]))
        weight_map |= dict.fromkeys(tensors, file)
        _save_tensors(tensors, target / file)
    if len(files) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
        write_content(target / f"{hf.files}.safetensors.index.json", index)
    ids = write_facts(facts, target, config.max_seq_len) if takes_text else {}
    write_content(target / "config.json", content | ids)
    return files, common


def _save_tensors(tensors: dict[str, Tensor], file: Path) -> None:
    """Write a file of weights with the mode that follows from the umask; safetensors would let only the owner read it."""
    file.touch()
    mode = file.stat().st_mode
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(mode)


def import_hf(source: Path, target: Path, dtype: torch.dtype | None = None, imports: Sequence[str] = ()) -> None:
    """Write a Hugging Face folder as a checkpoint that holds only `model.*`. The checkpoint's config.json has the model
    section. `imports` are the user's modules, one of which may define the family.
    """
    require_user_modules(list(imports), "--imports")
    if not source.is_dir():
        raise ConfigError(f"{source}: no such folder")
    folder = Folder(source)
    model = meta_state(folder.config)
    stored = folder.dtypes(model)
    if missing := model.keys() - stored.keys():
        raise ConfigError(f"{source}: has no {folder.hf.name(min(missing))}, which its config.json asks for")
    state = {
        PREFIX + name: torch.empty(tensor.shape, dtype=in_dtype(tensor, dtype or stored[name]), device="meta")
        for name, tensor in model.items()
    }

    def read(key: str) -> Tensor:
        return folder.tensor(key.removeprefix(PREFIX), state[key].shape, state[key].dtype)

    make_target(target)
    content = {"model": to_dict(folder.config), "train": {"imports": list(imports)}}
    facts = facts_at(source.absolute())
    if facts.tokenizer:
        content["tokenizer"] = {name: facts.tokenizer[name] for name in ("name", "path")}
    layout.FACTS.write(target, asdict(facts))
    write_content(target / "config.json", content)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(target), planner=LazySavePlanner(read), no_dist=True)


def read_model_config(checkpoint: Path, config_file: Path | None = None) -> Model:
    """Read the model section of a checkpoint's config.json. The user's modules are imported first, as one of them may
    define the family. Raises ConfigError if there is no such section.
    """
    candidates = [config_file] if config_file else config_files(checkpoint)
    there = [file for file in candidates if file.is_file()]
    if not there:
        raise ConfigError(f"{candidates[-1]}: no such file; name the run's config.json with --config")
    file = there[0]
    try:
        content = content_of(file)
        require_user_modules(content.get("train", {}).get("imports", []))
        return from_dict(Model, content["model"])
    except (KeyError, TypeError) as error:
        model = content.get("model")
        faults = give_types(Model, dict(model), "model.", needed=False) if isinstance(model, dict) else ()
        lines = [f"{file}: {fault}; the version of titan_hydra that wrote it reads these weights" for fault in faults]
        raise ConfigError("\n".join(lines) or f"{file}: not the config.json of a run ({error})") from error


def rules_of_weights(checkpoint: Path, config_file: Path | None = None) -> Rules | None:
    """Return the rules of the parametrization in which a checkpoint's weights were trained; None if its config.json names
    none.
    """
    _, section = find_section("parametrization", checkpoint, config_file)
    if not section:
        return None
    return rules_of(read_model_config(checkpoint, config_file), from_dict(Parametrization, section))


def check_scales(source: Path, rules: Rules) -> None:
    """Raise ConfigError if the weights of a checkpoint or Hugging Face folder were trained with other scales of the
    forward than those of `rules`.
    """
    theirs = None if is_hf(source) else rules_of_weights(source)
    there = theirs.scales if theirs else (1.0, 1.0, 1.0)
    if there != rules.scales:
        raise ConfigError(
            f"checkpoint.initial_load_path={source}: its weights belong to the scales {there} of attention, branches and "
            f"output, and this job's parametrization has {rules.scales}; nearest legal: that run's parametrization, or "
            "its export (titan checkpoint export) with parametrization=standard"
        )


def reader_of(checkpoint: Path, config_file: Path | None = None, ema: bool = False) -> Reader | Merged:
    """Return a reader of a checkpoint's weights, converted to the standard parametrization, or, with `ema`, of their
    moving averages. If the checkpoint holds adapters, the reader merges them into the weights of initial_load_path.
    """
    base = frozen_weights(checkpoint, config_file)
    if base is None:
        rules = rules_of_weights(checkpoint, config_file)
        return Reader(checkpoint, folded(meta_state(rules.model), rules) if rules else None, ema)
    _, adapter = find_section("adapter", checkpoint, config_file)
    beside = Folder(base, hf_of(read_model_config(checkpoint, config_file))) if is_hf(base) else Reader(base)
    return Merged(beside, Reader(checkpoint, ema=ema), adapter["alpha"] / adapter["rank"])


def frozen_weights(checkpoint: Path, config_file: Path | None = None) -> Path | None:
    """Return the folder of the frozen weights to which a checkpoint's adapters belong; None if it holds whole weights.
    Adapters that went on from earlier ones have the same frozen weights. Raises ConfigError if these were not saved.
    """
    base = None
    while holds_adapters(base or checkpoint, config_file):
        file, section = find_section("checkpoint", base or checkpoint, config_file)
        if not section.get("initial_load_path"):
            raise ConfigError(
                f"{file}: checkpoint.initial_load_path=null: the adapters belong to weights that were drawn from the seed and not saved"
            )
        base, config_file = initial_weights(file.parent, as_started(file, section["initial_load_path"])), None
    return base


class LazySavePlanner(dcp.DefaultSavePlanner):
    """Saves a state dict of meta tensors; `read(key)` supplies each real tensor when it is written."""

    def __init__(self, read: Callable[[str], Tensor]):
        super().__init__()
        self.read = read

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self.read(index.fqn)


def _check_stored(metadata: Metadata, shapes: dict[str, torch.Size], checkpoint: Path) -> None:
    """Raise ConfigError if a checkpoint lacks a weight of the model, has one of another shape, or has one too many."""
    stored = {
        key.removeprefix(PREFIX): entry.size
        for key, entry in metadata.state_dict_metadata.items()
        if key.startswith(PREFIX) and isinstance(entry, TensorStorageMetadata)
    }
    for name in shapes | stored:
        if shapes.get(name) != stored.get(name):
            has, needs = (
                tuple(shapes_by_name[name]) if name in shapes_by_name else "nothing"
                for shapes_by_name in (stored, shapes)
            )
            raise ConfigError(
                f"{checkpoint}: {PREFIX}{name} is {has}, but the model of its config.json has {needs} there"
            )


def _plan_shards(sizes: dict[str, int], limit: float) -> list[list[str]]:
    """Distribute tensors over files, in order. A file has more than `limit` bytes only if it is a single tensor."""
    shards, used = [[]], 0
    for name, size in sizes.items():
        if shards[-1] and used + size > limit:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    return shards


def _shard_name(stem: str, index: int, count: int) -> str:
    return f"{stem}.safetensors" if count == 1 else f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors"


def make_target(target: Path) -> None:
    """Create the folder of a conversion. Raises ConfigError if the folder is not empty or cannot be written."""
    try:
        target.mkdir(parents=True, exist_ok=True)
        occupied = any(target.iterdir())
    except OSError as error:
        raise ConfigError(f"{target}: cannot be written ({error.strerror})") from error
    if occupied:
        raise ConfigError(f"{target}: exists and is not empty; name a new folder")
    if not os.access(target, os.W_OK):
        raise ConfigError(f"{target}: cannot be written (permission denied)")


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target`, and put it in the place of `target` if the block ends without an error. A reader
    sees either the old folder or the new one, never a mixture. Raises ConfigError if `target` holds something else than
    exported or imported weights.
    """
    target = target.absolute()
    there = target.is_dir() and any(target.iterdir())
    if target.exists() and not target.is_dir():
        raise ConfigError(f"--replace: {target} is no folder")
    if there and not (is_hf(target) or complete_at(target) == target):
        raise ConfigError(f"--replace: {target} holds no weights of titan checkpoint, so it is not replaced")
    new = target.with_name(f".{target.name}.new-{os.getpid()}")
    try:
        yield new
        if there:
            _exchange(new, target)
        else:
            new.rename(target)  # an empty folder is replaced too
    finally:
        shutil.rmtree(new, ignore_errors=True)  # after the exchange, this is the old folder


def _exchange(new: Path, old: Path) -> None:
    """Exchange two folders, at once where the file system can do that."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.renameat2(HERE, os.fsencode(new), HERE, os.fsencode(old), EXCHANGE) == 0:
        return
    if (code := ctypes.get_errno()) not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(code, os.strerror(code), str(old))
    aside = old.with_name(f"{new.name}.old")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)


def export_peft(source: Path, target: Path, dtype: torch.dtype, config_file: Path | None = None) -> int:
    """Write the adapters of a checkpoint or run, without the model's weights. Return the number of linears that have an
    adapter. Raises ConfigError if the run was trained without adapters.
    """
    checkpoint = find_checkpoint(source)
    config, reader = read_model_config(checkpoint, config_file), reader_of(checkpoint, config_file)
    if not isinstance(reader, Merged):
        raise ConfigError(f"{source}: was trained without adapters; export it with --to hf")
    _, adapter = find_section("adapter", checkpoint, config_file)
    base = frozen_weights(checkpoint, config_file)
    hf, tensors, targets = hf_of(config), {}, set()
    for name, shape in ((name, meta.shape) for name, meta in meta_state(config).items()):
        if lora := reader.adapter(name):
            theirs = hf.name(name).removesuffix(".weight")
            targets.add(theirs.rpartition(".")[2])
            for part, ours in (("lora_A", "lora_a"), ("lora_B", "lora_b")):
                # PEFT names a linear; a stack of experts is one linear for each expert, whose number stands for {}
                each = lora[ours].to(dtype) if "{}" in theirs else lora[ours].to(dtype)[None]
                tensors |= {
                    f"base_model.model.{theirs.format(expert)}.{part}.weight": matrix.clone()
                    for expert, matrix in enumerate(each)
                }
        elif name in reader.changed and not torch.equal(*reader.both(name, shape)):
            raise ConfigError(f"{source}: {name} has changed, and PEFT has no place for it; nearest legal: --format hf")
    make_target(target)
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": adapter["rank"],
        "lora_alpha": adapter["alpha"],
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(targets),
    }
    write_content(target / "adapter_config.json", about)
    return len(tensors) // 2
