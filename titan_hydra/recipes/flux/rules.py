"""What the objective `diffusion` cannot be combined with."""

from collections.abc import Iterator
from math import isqrt
from typing import Any

from titan_hydra.core.job.adapter import adapts
from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.schema import Job


def faults(job: Job) -> Iterator[Fault]:
    """Images are square. Context parallelism splits both the image's tokens and the text's. There are no documents to
    mask or to pack.
    """
    model: Any = job.model
    seq_len, text_len, parts = job.data.seq_len, model.text_len, job.parallelism.sequence_parts
    image, side = seq_len - text_len, isqrt(max(seq_len - text_len, 1))
    if image != side * side:
        yield Fault(
            "data.seq_len",
            seq_len,
            f"model.text_len={text_len} tokens of text leave {image} for the image, not a square number",
            legal=tuple(text_len + near * near for near in (side, side + 1)),
        )
        return
    for kind, length in (("text", text_len), ("the image", image)):
        if length % parts:
            yield fault_at(job, "parallelism.cp", f"{length} tokens of {kind} cannot be cut into {parts} parts")
    if job.data.document_mask:
        yield fault_at(job, "data.document_mask", f"objective={job.objective.name} has no documents to separate", False)
    if adapts(job):
        yield fault_at(
            job,
            "adapter.name",
            f"model.family={job.model.family} has blocks of two kinds, which get no adapters",
            "none",
        )
