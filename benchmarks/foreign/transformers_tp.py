"""Qwen3 and Llama of transformers with their `tp_plan`, loaded as its users load them: Subjects of `titan verify --module`."""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, Qwen3Config
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3ForCausalLM

from titan_hydra.instruments.verify.subject import Subject

SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def build(kind, config):
    """Return a model with random weights, the same at every call."""
    torch.manual_seed(1)
    return kind(config)


def load(model, mesh):
    """Save a model, and load this rank's part of it by the tp_plan of its class."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    model.save_pretrained(folder[0])  # only rank 0 writes
    dist.barrier()
    config = DistributedConfig(tp_plan="auto", tp_size=mesh.size())
    return (
        type(model)
        .from_pretrained(folder[0], distributed_config=config, dtype=torch.float32, attn_implementation="eager")
        .train()
    )


def batch(step):
    """Return the tokens of a step."""
    return {"input_ids": torch.randint(256, (4, 16), generator=torch.Generator().manual_seed(step))}


def loss(model, samples, mesh):
    """Return the mean loss of the next tokens."""
    return model(input_ids=samples["input_ids"], labels=samples["input_ids"]).loss


def subject(kind, config, accumulation):
    """Return a Subject of two tensor-parallel ranks."""
    return Subject(
        mesh={"tp": 2},
        model=lambda: build(kind, config),
        parallelize=load,
        batch=batch,
        loss=loss,
        accumulation=accumulation,
    )


qwen3 = subject(Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16), 1)
qwen3_accumulation = subject(Qwen3ForCausalLM, Qwen3Config(**SIZES, head_dim=16), 2)
llama = subject(LlamaForCausalLM, LlamaConfig(**SIZES), 1)
llama_accumulation = subject(LlamaForCausalLM, LlamaConfig(**SIZES), 2)
