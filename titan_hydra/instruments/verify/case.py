"""A case of the acceptance matrix, and the model that most cases train. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# A model that trains in seconds and has what layouts split: grouped queries, several blocks, and a feed-forward whose
# width is not a power of two.
BASE = (
    "precision=fp32",
    "model.dim=64",
    "model.n_layers=4",
    "model.n_heads=8",
    "model.n_kv_heads=4",
    "model.ffn_dim=192",
    "model.vocab_size=512",
    "data=synthetic",
    "data.seq_len=32",
    "data.global_batch=16",
    "lr_scheduler.warmup_steps=2",
    "optimizer.lr=2e-3",
    "checkpoint=off",
)

# cases that a rule refuses with torch 2.11, which cannot split these backwards (core/job/rules/pipeline.py)
NOT_ON_OLD_TORCH = (
    "pp 2, zbv, linear cross-entropy",
    "linear_cross_entropy, pp 2, zbv",
    "float8 fused, pp 2, zbv",
    "qwen3_moe, fsdp 4, pp 2, interleaved_zb, ep 2",
    "deepseek_v3, fsdp 4, pp 2, interleaved_zb, ep 2",
)
QUICK_STEPS = 3  # optimizer steps of a case in the tests
# The smallest global batch of a case that may need a band: its draws cut the batch into as many as four parts and change
# the order of the samples (judge.DRAWS).
SAMPLES = 4


@dataclass(frozen=True)
class Case:
    """A layout to be verified. Its reference is the same job in one process, or reference.py in float64.

    The bounds limit relative differences. If the steps of a case amplify rounding, its bounds are wide, and judge.py
    measures a narrower band.
    """

    name: str
    ranks: int  # number of gloo ranks
    overrides: tuple[str, ...]  # the overrides that choose the layout
    base: tuple[str, ...] = ()  # overrides of both the layout's job and its reference
    # whether labels are ignored: in each sample and step a different number of them (verify.vary)
    uneven_mask: bool = False
    documents: bool = False  # whether a sample consists of documents that do not attend to each other (verify.vary)
    empty_step: bool = False  # whether no label at all counts at step 2 (verify.vary)
    # whether the run is saved halfway and continued by a new trainer, and compared with an uninterrupted reference
    resumed: bool = False
    # further overrides of the trainer that continues after the restart; only a float64 reference follows keys that
    # change what is learned
    then: tuple[str, ...] = ()
    validated: bool = False  # whether the held-out loss is measured at the end (twice, if resumed) and compared too
    # whether the model is also exported, and the export's held-out loss compared; only with one process
    exported: bool = False
    reference: Literal["process", "float64"] = "process"
    loss: float = 1e-5  # bound of each step's loss
    norm: float = 1e-5  # bound of each step's gradient norm
    gradients: float = 1e-5  # bound of the worst parameter's gradient at the first step
    weights: float = 1e-3  # bound of the worst parameter's weight at the end, relative to how far the weight has moved
    # whether every token must use the same experts as in the reference; False in bf16, where rounding changes the
    # experts of some tokens
    routing: bool = True
    threads: bool = False  # whether the ranks are threads of one process (threads.py)
    slow: bool = False  # whether the case takes many seconds, so that `pytest -m "not slow"` leaves it out
    config_dir: Path | tuple[Path, ...] | None = None  # folders with the user's options

    @property
    def quick(self) -> bool:
        """Whether it is short: a cover of the short cases is in the default test suite."""
        return (self.ranks <= 2 or self.threads) and not self.slow


def later_wins(*overrides: str) -> list[str]:
    """Keep only the last override of each key: Hydra refuses a command line that chooses a group twice."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


def case(name: str, ranks: int, *overrides: str, **options) -> Case:
    """Build a case with gpus=`ranks`."""
    return Case(name, ranks, (f"gpus={ranks}", *overrides), **options)
