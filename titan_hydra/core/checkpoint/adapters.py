"""Export the adapters of a run, without the model's weights, in the format of Hugging Face's PEFT: the two files
adapter_model.safetensors and adapter_config.json.
"""

from pathlib import Path

import torch
from safetensors.torch import save_file

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.run.inputs import initial_weights
from titan_hydra.core.models.hf import hf_of, meta_state

from .convert import make_target, read_model_config, reader_of
from .folder import write_content
from .reader import Merged
from .sections import as_started, find_checkpoint, find_section


def export_peft(source: Path, target: Path, dtype: torch.dtype, config_file: Path | None = None) -> int:
    """Write the adapters of a checkpoint or run. Return the number of linears that have an adapter. Raises ConfigError if
    the run was trained without adapters.
    """
    checkpoint = find_checkpoint(source)
    config, reader = read_model_config(checkpoint, config_file), reader_of(checkpoint, config_file)
    if not isinstance(reader, Merged):
        raise ConfigError(f"{source}: was trained without adapters; export it with --to hf")
    _, adapter = find_section("adapter", checkpoint, config_file)
    file, section = find_section("checkpoint", checkpoint, config_file)
    base = initial_weights(file.parent, as_started(file, section["initial_load_path"]))
    hf, tensors, targets = hf_of(config), {}, set()
    for name in meta_state(config):
        if found := reader.adapter(name):
            theirs = hf.name(name).removesuffix(".weight")
            targets.add(theirs.rpartition(".")[2])
            tensors |= {
                f"base_model.model.{theirs}.{part}.weight": found[ours].to(dtype)
                for part, ours in (("lora_A", "lora_a"), ("lora_B", "lora_b"))
            }
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
