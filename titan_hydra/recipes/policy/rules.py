"""With which options the objective `dpo` cannot be combined."""

from collections.abc import Iterator

from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.schema import Job


def faults(job: Job) -> Iterator[Fault]:
    """A loss of whole documents needs their indices and all of their tokens on one rank. The experts' balance loss is
    refused: it is scaled like a token's loss, and there is no loss of single tokens.
    """
    objective = f"objective={job.objective.name}"
    if not job.data.document_mask:
        yield Fault("data.document_mask", False, f"{objective} compares documents", legal=(True,))
    if job.parallelism.cp > 1:
        yield fault_at(job, "parallelism.cp", f"{objective} sums over whole documents", 1)
    if balance := getattr(job.model, "sequence_balance", 0):
        reason = f"it is scaled like a token's loss, and {objective} has none"
        yield Fault("model.sequence_balance", balance, reason, legal=(0,))
