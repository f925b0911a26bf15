"""Losses on log-probabilities: of a preferred and a rejected answer (dpo), or of sampled tokens with advantages
(policy).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_hydra.core.data.batch import Batch, Dims
from titan_hydra.core.data.loader import Sample
from titan_hydra.core.parallel.mesh import local_part
from titan_hydra.core.train.objectives import Tensors
from titan_hydra.core.train.objectives.language import IGNORED
from titan_hydra.recipes.chat.objective import SupervisedFineTuning


class Likelihood(SupervisedFineTuning):
    """Fine-tuning with a loss on the log-probability of each label, and on further arrays of the samples."""

    values: tuple[str, ...]  # names of the further arrays, each [seq_len + 1] in a sample

    def blank_sample(self) -> Sample:
        return super().blank_sample() | {name: np.zeros(self.job.data.seq_len + 1, np.float32) for name in self.values}

    def batch(self, samples: Sequence[Sample], separators: tuple[int | None, int | None]) -> Batch:
        numbers = {name: torch.from_numpy(np.stack([sample[name][1:] for sample in samples])) for name in self.values}
        return Batch(super().batch(samples, separators).tensors | numbers, self.dims)

    def inputs(self, batch: Tensors) -> tuple[Tensor, Tensors]:
        first, others = super().inputs(batch)
        if "targets" in others:
            # with this shape, the head returns the loss of each token
            others["targets"] = others["targets"].unsqueeze(-1)
        return first, others

    def log_probabilities(self, output: Tensor, batch: Tensors) -> Tensor:
        """Return the log-probability of each label [batch, seq] in float32; 0 where no label counts."""
        if self.job.loss.name == "linear_cross_entropy":
            return -local_part(output)
        labels = batch["labels"]
        losses = F.cross_entropy(output.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return -local_part(losses).view(labels.shape)


class Preference(Likelihood):
    """Direct preference optimization (arXiv 2305.18290): -log sigmoid(beta * margin) of each pair. The gain of an
    answer is its log-probability minus the reference's; the margin is the preferred answer's gain minus the rejected
    one's.

    The answers of pair p of a sample are its documents 2p and 2p + 1. The loss is a mean over pairs.
    """

    values = ("reference",)
    dims = SupervisedFineTuning.dims | {"reference": Dims(sequence=1), "pairs": Dims(), "documents": Dims()}

    def batch(self, samples: Sequence[Sample], separators: tuple[int | None, int | None]) -> Batch:
        batch = super().batch(samples, separators)
        learned = batch["documents"].masked_fill(batch["labels"] == IGNORED, -1)
        # the largest number of pairs in a sample: each pair has two documents of at least two tokens
        places = torch.arange(self.job.data.seq_len // 4 + 1)
        pairs = torch.stack([torch.isin(2 * places, row) for row in learned])
        return Batch(batch.tensors | {"pairs": pairs}, self.dims)

    def count(self, batch: Tensors) -> Tensor:
        return batch["pairs"].sum()

    def loss(self, output: Tensor, batch: Tensors) -> Tensor:
        # float64, as the loss depends on a small difference between sums in the hundreds
        grown = (self.log_probabilities(output, batch) - batch["reference"]).double()
        samples, places = grown.shape[0], 2 * batch["pairs"].shape[1]
        row = torch.arange(samples, device=grown.device).unsqueeze(1) * places
        # the last document may be padding, without a label
        ids = (row + batch["documents"].clamp(max=places - 1)).flatten()
        sums = torch.zeros(samples * places, dtype=grown.dtype, device=grown.device).index_add(0, ids, grown.flatten())
        chosen, rejected = sums.view(samples, -1, 2).unbind(-1)
        return -(F.logsigmoid(self.keys.beta * (chosen - rejected)) * batch["pairs"]).sum().float()


class ClippedPolicy(Likelihood):
    """The clipped objective of PPO (arXiv 1707.06347). For each label, its advantage is multiplied by the ratio of its
    probability to its probability at sampling time. There is no gradient once the ratio has left 1 +- clip in the
    direction of the advantage.
    """

    values = ("old_logprobs", "advantages")
    dims = SupervisedFineTuning.dims | {"old_logprobs": Dims(sequence=1), "advantages": Dims(sequence=1)}

    def loss(self, output: Tensor, batch: Tensors) -> Tensor:
        clip, advantages = self.keys.clip, batch["advantages"]
        ratio = (self.log_probabilities(output, batch) - batch["old_logprobs"]).exp()
        gains = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
        return -(gains * (batch["labels"] != IGNORED)).sum()
