"""Print the attention kernels of each job's model that are not the package's, built on the meta device.

echo "[$(cat config.json)]" | python -m titan_hydra.core.train.own_kernels
"""

import json
import sys

import torch

from titan_hydra.core.job.config import Job, from_dict
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.kernels.attention import SDPA


def kernels_of(job: Job) -> list[str]:
    """Return the names of the classes of a model's own attention kernels, each once."""
    family = family_of(job.model)
    with torch.device("meta"):
        model = family.part("model")(job.model, job.data.seq_len)
    parts = (part for block in family.blocks(model).values() for part in block.modules())
    kernels = (getattr(part, "sdpa", None) for part in parts)
    return sorted({type(kernel).__name__ for kernel in kernels if kernel is not None and type(kernel) is not SDPA})


if __name__ == "__main__":
    print(json.dumps([kernels_of(from_dict(Job, job)) for job in json.load(sys.stdin)]))
