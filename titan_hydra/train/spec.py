"""What a model family needs to be trained, by name: the package's own families, and those of a user's modules (`train.imports`).

After TorchTitan's TrainSpec (CODEML 2025, section 3): a new model, or a new way to parallelize one, is one file and one row, and the loop
stays as it is. docs/extend.md shows it.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from titan_hydra import data, models, parallel
from titan_hydra.base.errors import ConfigError
from titan_hydra.config.schema import Job
from titan_hydra.config.user_code import load_user_modules
from titan_hydra.data import tokenizer
from titan_hydra.models.flops import flops_per_token
from titan_hydra.observe.metrics import Metrics
from titan_hydra.parallel.stages import split

from .loss import LOSSES
from .optimizer import build_optimizers, lr_factor


@dataclass(frozen=True)
class TrainSpec:
    """The parts that the trainer combines. All but the name and the model default to those of Llama 3."""

    name: str
    model: Callable[..., nn.Module]  # (Model, seq_len): a module with tok_embeddings, layers, norm, output; a stage lacks some
    parallelize: Callable = parallel.apply  # (stage, Mesh, Job): in place, on the meta device
    pipeline: Callable = split  # (model, Mesh, Job): this rank's stages
    optimizers: Callable = build_optimizers  # (model, Optimizer): a list of them
    lr_factor: Callable = lr_factor  # (step, steps, LrSchedule): the share of the peak rate
    data: Callable = data.build  # (Job, rank, ranks, split, load_tokenizer): a Loader
    tokenizer: Callable = tokenizer.load  # (Tokenizer): encode, decode, vocab_size, bos_id, eos_id
    losses: dict[str, Callable] = field(default_factory=lambda: LOSSES)  # by loss.name: (logits, labels), summed over tokens
    metrics: Callable = Metrics  # (Job, Run, device, resumed_at, flops per token)
    flops_per_token: Callable = flops_per_token  # (Model, seq_len): forward and backward

    def build_data(self, job: Job, rank: int, ranks: int, split: str = "train") -> data.loader.Loader:
        """Build the loader of one data-parallel rank, with this spec's tokenizer."""
        return self.data(job, rank, ranks, split, self.tokenizer)


SPECS: dict[str, TrainSpec] = {name: TrainSpec(name, model) for name, model in models.REGISTRY.items()}


def register(spec: TrainSpec) -> None:
    """Add a family under the name that `model.family` gives. Raises ConfigError if another spec has the name."""
    if spec.name in SPECS and SPECS[spec.name] != spec:
        raise ConfigError(f"model.family={spec.name}: this name is taken")
    SPECS[spec.name] = spec


def spec_of(job: Job) -> TrainSpec:
    """Import the job's own modules and return the spec of its family. Raises ConfigError if there is none."""
    if faults := load_user_modules(job.train.imports):
        raise ConfigError("\n".join(map(str, faults)))
    if job.model.family not in SPECS:
        raise ConfigError(f"model.family={job.model.family}: no such model; there are: {', '.join(SPECS)}")
    return SPECS[job.model.family]
