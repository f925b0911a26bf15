"""The ways in which a rank of a run may end, and what a user is then told: the same with every executor. The tests of the
local launcher, of SLURM and of Kubernetes read this one list.
"""

from dataclasses import dataclass
from typing import Any

HANG = 20  # seconds without progress that are a hang; short enough for a test, long enough for a busy machine


@dataclass(frozen=True)
class Ending:
    """One rank of two runs `act` in step 3, or while the model is built. What follows: the class of the failure, the exit
    status, the rank that is named if one is certain, and words of the failure's line.
    """

    act: str
    failure: str
    status: int
    words: str
    rank: int = 1  # the rank that acts
    named: bool = True  # whether `titan status` names this rank
    build: bool = False  # whether it acts while the model is built
    killed: bool = False  # whether SLURM may see the signal instead of the status


ENDINGS = {
    "raises": Ending("raise ValueError('unlucky rank')", "bug", 1, "rank 1: ValueError: unlucky rank"),
    "exits with 1": Ending("os._exit(1)", "bug", 1, "rank 1 ended with status 1 and without a word"),
    "exits with 0": Ending("os._exit(0)", "bug", 1, "rank 1 ended with status 0 and without a word"),
    "is killed": Ending("os.kill(os.getpid(), 9)", "killed", 1, "rank 1 was killed by signal 9", killed=True),
    "crashes in C": Ending(
        "import ctypes; ctypes.string_at(0)", "bug", 1, "rank 1 was killed by signal 11", killed=True
    ),
    "has no device memory": Ending(
        "import torch; raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20.00 MiB')",
        "out of memory", 76, "rank 0, step 3: OutOfMemoryError", rank=0,
    ),
    "has no memory, as its cause says": Ending(
        "raise RuntimeError('stage 1 failed') from MemoryError('no more')",
        "out of memory", 76, "rank 1, step 3: RuntimeError: stage 1 failed",
    ),
    "diverges": Ending(
        "next(self.model.parameters()).detach().to_local().fill_(float('nan'))",
        "not finite", 78, "loss nan", named=False,
    ),
    "raises that it diverges": Ending("raise loop.NotFinite('step 3: loss nan')", "not finite", 78, "step 3: loss nan"),
    "waits for ever": Ending("time.sleep(1000)", "hang", 77, "rank 1", killed=True),
    "is frozen": Ending("os.kill(os.getpid(), 19)", "hang", 77, "rank 1 was late", killed=True),
    "raises in the build": Ending(
        "raise ValueError('a build that fails')", "bug", 1, "rank 1: ValueError: a build that fails", build=True
    ),
    "has a config that this node cannot run": Ending(
        "raise errors.ConfigError('data.path=gone.txt: no such file')", "config", 2, "data.path=gone.txt", build=True
    ),
}  # fmt: skip
NUMBERS = {name: number for number, name in enumerate(ENDINGS)}

# The cell's max_norm minus 1000 is the number of its ending: no gradient has so large a norm, so that this changes the
# identity of a run and nothing that it computes. The file `struck_NUMBER` has the time at which the rank acts.
CODE = f"""
import time
from titan_hydra.core.base import errors
ENDINGS = {[(one.rank, one.build, one.act) for one in ENDINGS.values()]!r}
update, build, steps = trainer.Trainer.update, loop.build, []
def strike(job, at_build, names):
    number = int(job.optimizer.max_norm) - 1000
    if 0 <= number < len(ENDINGS) and ENDINGS[number][:2] == (rank, at_build):
        open(f"struck_{{number}}", "w").write(str(time.time()))
        exec(ENDINGS[number][2], {{**globals(), **names}})
def struck_update(self, *given):
    steps.append(1)
    if len(steps) == 3:
        strike(self.job, False, {{"self": self}})
    update(self, *given)
def struck_build(job, device):
    strike(job, True, {{}})
    return build(job, device)
trainer.Trainer.update, loop.build = struck_update, struck_build
"""


def override(name: str) -> str:
    """Return the override of the run that ends so."""
    return f"optimizer.max_norm={1000 + NUMBERS[name]}"


def check(name: str, row: dict[str, Any]) -> None:
    """Compare a run, as `titan status --json` prints it, with what its ending is to be called."""
    ending, failure = ENDINGS[name], row["failure"]
    assert row["state"] == "failed" and failure, (name, row)
    assert (failure["kind"], failure["status"]) == (ending.failure, ending.status), (name, failure)
    assert failure["rank"] == ending.rank or not ending.named, (name, failure)
    assert ending.words in failure["line"], (name, failure)
