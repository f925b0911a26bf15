"""What a job is: the typed schema, its loading, the identity hash. Importing titan_hydra.core.job.config does not import torch."""

import importlib

from .additions import additions
from .fault import Fault
from .load import from_dict, identity, read, to_dict
from .schema import Job

__all__ = ["Fault", "Job", "from_dict", "identity", "read", "to_dict"]

# The package's own parts, families and executors register themselves in the same way as a user's module does, and so do
# instruments and recipes.
OWN_FAMILIES = ("llama3", "qwen3", "qwen3_moe", "deepseek_v3")
for room in (
    "core.job.config.parts",
    *(f"core.models.{family}" for family in OWN_FAMILIES),
    "experiments.launch.executors",
):
    importlib.import_module(f"titan_hydra.{room}")
additions()
