"""Measure what attention over packed documents saves by using no mask, on a CPU: python benchmarks/documents.py

Time: the process time of attention's forward and backward with a mask, divided by the time without one. The two
variants are measured in turn a few times, and the fastest time of each counts. Memory: the live bytes that the fake
world counts in a step, for one sample and 4 blocks of width 1024. The two variants use the same kernel of torch.
"""

import time
from unittest import mock

import numpy as np
import torch

from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.kernels.documents import document_mask, document_offsets
from titan_hydra.core.models import layers
from titan_hydra.core.train.count import count_rank
from titan_hydra.core.train.objectives.language import ends_of
from titan_hydra.experiments.compose.compose import compose_unchecked

JOB = (
    "model=llama3_debug",
    "model.n_heads=32",
    "model.dim=1024",
    "model.n_kv_heads=8",
    "model.n_layers=4",
    "data=embedded",
    "precision=bf16",
    "data.document_mask=true",
    "data.local_batch=1",
    "gpus=1",
    "parallelism=single",
    "comm=fake",
)
MASKED = mock.patch.object(layers, "takes_offsets", lambda asked, call: False)
TURNS = 4


def main() -> None:
    print("| tokens | documents | ms with the mask | without | ratio |\n|---|---|---|---|---|")
    for seq_len, number in ((256, 1), (256, 4), (1024, 16), (4096, 1), (4096, 16), (4096, 256)):
        masked, linear = seconds(seq_len, number)
        print(
            f"| {seq_len:,} | {number} | {1e3 * masked:.1f} | {1e3 * linear:.1f} | {masked / linear:.1f} |", flush=True
        )
    print("\n| tokens | MiB live with the mask | without |\n|---|---|---|")
    for seq_len in (1024, 4096, 8192):
        job = freeze(compose_unchecked(*JOB, f"data.seq_len={seq_len}"))
        linear = count_rank(job, 0).live
        with MASKED:
            masked = count_rank(job, 0).live
        print(f"| {seq_len:,} | {masked / 2**20:,.0f} | {linear / 2**20:,.0f} |", flush=True)


def seconds(seq_len: int, number: int) -> tuple[float, float]:
    """Return the seconds of attention over documents of one length, with and without a mask: 8 query heads, 2 key/value
    heads, width 64, bf16.
    """
    ends = torch.from_numpy(ends_of(np.repeat(np.arange(number), seq_len // number)[None]))
    q, k, v = (
        torch.randn(1, seq_len, heads, 64, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for heads in (8, 2, 2)
    )
    sdpa, fastest = layers.SDPA("auto"), [float("inf")] * 2
    for turn in range(2 * TURNS):
        began = time.process_time()
        documents = document_offsets(ends) if turn % 2 else document_mask(ends, seq_len)
        sdpa(q, k, v, documents).sum().backward()
        fastest[turn % 2] = min(fastest[turn % 2], time.process_time() - began)
    return fastest[0], fastest[1]


if __name__ == "__main__":
    main()
