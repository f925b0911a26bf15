"""Llama 3 of torchtune, parallelized as its recipe full_finetune_distributed does: Subjects of `titan verify --module`."""

import torch
import torch.nn.functional as F
from torch.distributed.tensor.parallel import parallelize_module
from torchtune import training
from torchtune.models.llama3 import base_llama_tp_plan
from torchtune.models.llama3._component_builders import llama3
from torchtune.models.llama3_2._component_builders import llama3_2

from titan_hydra.instruments.verify.subject import Subject

SIZES = {
    "vocab_size": 256,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 64,
    "max_seq_len": 64,
    "intermediate_dim": 192,
}


def build(kind):
    """Return a model with random weights, the same at every call."""
    torch.manual_seed(1)
    return kind(**SIZES)


def parallelize(model, mesh):
    """Apply the tensor-parallel plan and FSDP2, in the recipe's order."""
    if mesh["tp"].size() > 1:
        model = training.prepare_mha_for_tp(model, mesh["tp"])
        parallelize_module(model, mesh["tp"], parallelize_plan=base_llama_tp_plan())
    if mesh["dp"].size() > 1:
        conditions = [lambda name, module: training.get_shard_conditions(name, module, names_to_match=None)]
        training.shard_model(model=model, shard_conditions=conditions, cpu_offload=False, dp_mesh=mesh["dp"])
    return model


def batch(step):
    """Return the tokens and labels of a step."""
    dice = torch.Generator().manual_seed(step)
    return {name: torch.randint(256, (8, 16), generator=dice) for name in ("tokens", "labels")}


def loss(model, samples, mesh):
    """Return the mean loss."""
    logits = model(samples["tokens"])
    return F.cross_entropy(logits.flatten(0, 1), samples["labels"].flatten(0, 1))


def subject(kind, dp, tp, accumulation=1):
    """Return a Subject of dp x tp ranks."""
    return Subject(
        mesh={"dp": dp, "tp": tp},
        model=lambda: build(kind),
        parallelize=parallelize,
        batch=batch,
        loss=loss,
        split=("dp",),
        accumulation=accumulation,
    )


fsdp = subject(llama3, 4, 1, 2)
tp = subject(llama3, 1, 2, 2)
fsdp_tp = subject(llama3, 2, 2)
tied_fsdp = subject(llama3_2, 2, 1)
tied_tp = subject(llama3_2, 1, 2)
