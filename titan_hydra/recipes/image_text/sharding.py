"""How tensor parallelism splits decoders that read images: the decoder is split, the tower is replicated."""

from __future__ import annotations

from dataclasses import replace

from titan_hydra.core.job.config.schema import Parallelism
from titan_hydra.core.models.llama3 import sharding as llama3
from titan_hydra.core.models.qwen3 import sharding as qwen3
from titan_hydra.core.parallel.plans import Linears, Plan
from titan_hydra.core.parallel.whole import Norm, WholeTree


def llama3_vision(config: Parallelism, norm: Norm, linears: Linears) -> Plan:
    """Return Llama 3's plan, with a replicated tower."""
    return with_tower(llama3.plan(config, norm, linears), config, norm, linears)


def qwen3_vision(config: Parallelism, norm: Norm, linears: Linears) -> Plan:
    """Return Qwen3's plan, with a replicated tower."""
    return with_tower(qwen3.plan(config, norm, linears), config, norm, linears)


def with_tower(decoder: Plan, config: Parallelism, norm: Norm, linears: Linears) -> Plan:
    """Return a decoder's plan, changed for a tower: the embeddings are split only after the tower has changed them."""
    whole = llama3.plan(replace(config, sequence_parallel=False), norm, linears).around["tok_embeddings"]
    return Plan(
        decoder.around | {"tok_embeddings": whole, "vision": WholeTree(config.sequence_parallel)}, decoder.block
    )
