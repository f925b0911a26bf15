"""The proofs of a certificate: jobs of reduced size learn what one process learns, from the same samples."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from titan_hydra.core import data
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.ranks import data_parallel

from .judge import Outcome
from .reduce import Proof
from .verify import prove, reference_key


def prove_all(proofs: Iterable[Proof]) -> list[Outcome]:
    """Run the proofs, each reference only once. Returns an outcome for each proof, in the order of `proofs`."""
    proofs = list(proofs)
    references = {reference_key(proof.case): (proof.case, proof.alone) for proof in reversed(proofs)}
    return prove([proof.case for proof in proofs], [proof.job for proof in proofs], references)


def misplaced(job: Job, steps: int = 3) -> str:
    """Compare the samples of all data-parallel ranks together with the samples of one process. Return the first step
    and tensor that differ; "" if all are equal.
    """
    ranks = data_parallel(job)
    loaders, whole = [data.build(job, rank, ranks) for rank in range(ranks)], data.build(job, 0, 1)
    try:
        for step in range(1, steps + 1):
            parts, batch = [loader.next() for loader in loaders], whole.next()
            for name, tensor in batch.tensors.items():
                together = torch.cat([part[name] for part in parts], batch.dims[name].samples)
                if not torch.equal(together, tensor):
                    return f"step {step}, {name}"
    finally:
        for loader in (*loaders, whole):
            loader.close()
    return ""
