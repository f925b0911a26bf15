"""The family of this project's model. It imports no torch: launch.py imports it to check a job."""

from titan_hydra.extend import Family, Llama3Config, register

register(
    Family(
        "parallel_llama",
        Llama3Config,
        "parallel_llama.model:ParallelLlama",
        "titan_hydra.extend:llama3_plan",
    )
)
