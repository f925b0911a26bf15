"""The rules of parametrizations: what mup needs to know of the model and its optimizer."""

from collections.abc import Iterator

from titan_hydra.core.job.adapter import adapts
from titan_hydra.core.job.config.family import FAMILIES, family_of
from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.registry import OPTIMIZERS, PARAMETRIZATIONS
from titan_hydra.core.job.config.schema import Job


def parametrizations_know_roles_and_rates(job: Job) -> Iterator[Fault]:
    """Factors depend on what a parameter maps between, which the family states, and on how an update depends on the
    gradient. An adapter's two matrices would need other factors.
    """
    name = job.parametrization.name
    if PARAMETRIZATIONS[name].rules is None:
        return
    if family_of(job.model).role is None:
        known = ", ".join(family for family, record in FAMILIES.items() if record.role)
        yield Fault(
            "parametrization.name",
            name,
            f"family {job.model.family} gives its parameters no roles (Family.role), as {known} do",
            legal=("standard",),
        )
    if not OPTIMIZERS[job.optimizer.name].like_adam:
        able = tuple(optimizer for optimizer, record in OPTIMIZERS.items() if record.like_adam)
        yield fault_at(
            job,
            "optimizer.name",
            f"parametrization={name} has no factors for it: its updates grow with the gradient",
            *able,
        )
    if adapts(job):
        yield fault_at(
            job, "adapter.name", f"parametrization={name} has no factors for the two matrices of an adapter", "none"
        )


RULES = [parametrizations_know_roles_and_rates]
