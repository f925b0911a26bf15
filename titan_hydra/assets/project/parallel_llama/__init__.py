"""The family of this project's model. It imports no torch: launch.py imports it to check a job."""

from titan_hydra.core.models import Family, register
from titan_hydra.core.models.llama3.config import Llama3Config

register(
    Family(
        "parallel_llama",
        Llama3Config,
        "parallel_llama.model:ParallelLlama",
        "titan_hydra.core.models.llama3.sharding:plan",
    )
)
