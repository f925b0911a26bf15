"""Tiny models of transformers' families, and ranks that trace them. Imported by ranks, too."""

import dataclasses
import json
from pathlib import Path

import torch
import torch.distributed as dist

from titan_hydra.core.job.config import from_dict, to_dict
from titan_hydra.core.job.config.schema import Job
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.verify.case import Case
from titan_hydra.instruments.verify.processes import spawn_ranks
from titan_hydra.instruments.verify.reference import Trace
from titan_hydra.instruments.verify.verify import trace

SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
FAMILIES = {  # model_type: what its config.json has beside SMALL
    "llama": {},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": EXPERTS,
    "mistral": {"sliding_window": 8},
    "mixtral": {"num_local_experts": 4},
    "gemma2": WINDOWS | {"query_pre_attn_scalar": 16},
    "gemma3_text": WINDOWS | {"query_pre_attn_scalar": 16},
    "gpt_oss": WINDOWS | PLAIN_ROPE | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phi3": {},
    "glm4": {},
    "olmo2": {},
}
JOB = (
    "model=transformers",
    "data=synthetic",
    "data.seq_len=32",
    "data.global_batch=8",
    "precision=fp32",
    "checkpoint=off",
    "lr_scheduler.warmup_steps=0",
    "steps=2",
    "metrics.log_every=1",
)
CASE = Case("uneven mask and documents", 1, (), uneven_mask=True, documents=True)


def folder_of(kind: str, root: Path, **changed) -> Path:
    """Write a folder with the config.json of a tiny model."""
    folder = root / kind
    folder.mkdir(parents=True, exist_ok=True)
    content = {"model_type": kind} | SMALL | FAMILIES.get(kind, {}) | changed
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def traced(root: Path, ranks: int, jobs: dict[str, Job], case: Case = CASE) -> dict[str, dict]:
    """Train jobs of so many ranks, and return by name what `trace` has found."""
    spawn_ranks(ranks, _trace_all, str(root), [(name, case, to_dict(job)) for name, job in jobs.items()])
    return {name: torch.load(root / f"{name}.pt") for name in jobs}


def _trace_all(device, folder, jobs):
    for name, case, config in jobs:
        found = trace(from_dict(Job, config), device, case)
        if dist.get_rank() == 0:
            torch.save(dataclasses.asdict(found), f"{folder}/{name}.pt")


def job(folder: Path, *overrides: str) -> Job:
    return compose_job(*JOB, f"model.path={folder}", *overrides)


def differences(found: dict, expected: Trace) -> dict[str, float]:
    """Return relative differences: of loss and norm in all steps, and of each gradient in the first step, largest first."""
    gradients, norm = expected.gradients, expected.norms[0]
    assert found["gradients"].keys() == gradients.keys()
    own = {
        name: ((found["gradients"][name].double() - right).norm() / right.norm().clamp(min=1e-12 * norm)).item()
        for name, right in gradients.items()
    }
    for name, values in (("losses", expected.losses), ("norms", expected.norms)):
        own[name] = max(abs(one / right - 1) for one, right in zip(found[name], values, strict=True))
    return dict(sorted(own.items(), key=lambda item: -item[1]))
