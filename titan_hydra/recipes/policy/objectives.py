"""Losses on log-probabilities: of a preferred and a rejected answer (dpo), or of sampled tokens with advantages
(policy).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_hydra.core.data.batch import Batch, Dims
from titan_hydra.core.data.loader import Sample
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.parallel.loss_head import entropies
from titan_hydra.core.parallel.mesh import local_part
from titan_hydra.core.train.objectives import Tensors
from titan_hydra.core.train.objectives.language import IGNORED
from titan_hydra.recipes.chat.objective import SupervisedFineTuning

from .config import logprobs_read

MOVED = 0.05  # mean |log ratio| of a first step, above which the column of old log-probabilities is doubted


class Likelihood(SupervisedFineTuning):
    """Fine-tuning with a loss on the log-probability of each label, and on further arrays of the samples."""

    values: tuple[str, ...]  # names of the further arrays, each [seq_len + 1] in a sample
    entropy = False  # whether the loss needs the entropy of each token's distribution

    def blank_sample(self) -> Sample:
        return super().blank_sample() | {name: np.zeros(self.job.data.seq_len + 1, np.float32) for name in self.values}

    def batch(self, samples: Sequence[Sample], separators: tuple[int | None, int | None]) -> Batch:
        numbers = {name: torch.from_numpy(np.stack([sample[name][1:] for sample in samples])) for name in self.values}
        return Batch(super().batch(samples, separators).tensors | numbers, self.dims)

    def inputs(self, batch: Tensors) -> tuple[Tensor, Tensors]:
        first, others = super().inputs(batch)
        if "targets" in others:
            # with this shape, the head returns the loss of each token and, if needed, its entropy
            others["targets"] = others["targets"].unsqueeze(-1).expand(-1, -1, 1 + self.entropy)
        return first, others

    def log_probabilities(self, output: Tensor, batch: Tensors) -> Tensor:
        """Return the log-probability of each label [batch, seq] in float32; 0 where no label counts."""
        if self.job.loss.name == "linear_cross_entropy":
            return -(local_part(output)[..., 0] if self.entropy else local_part(output))
        labels = batch["labels"]
        losses = F.cross_entropy(output.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="none")
        return -local_part(losses).view(labels.shape)

    def entropies(self, output: Tensor) -> Tensor:
        """Return the entropy of each token's distribution [batch, seq]."""
        if self.job.loss.name == "linear_cross_entropy":
            return local_part(output)[..., 1]
        return entropies(output)


def with_columns(loss: Tensor, columns: Sequence[Tensor], counts: Tensor) -> Tensor:
    """Return a summed loss and the sum of each column over the elements that count, as an objective's `loss` does."""
    sums = (torch.stack([*columns]).detach().float() * counts).flatten(1).sum(1)
    return torch.cat([loss.reshape(1), sums])


class Preference(Likelihood):
    """Direct preference optimization (arXiv 2305.18290): -log sigmoid(beta * margin) of each pair. The gain of an
    answer is its log-probability minus the reference's; the margin is the preferred answer's gain minus the rejected
    one's.

    The answers of pair p of a sample are its documents 2p and 2p + 1. The loss is a mean over pairs.
    """

    values = ("reference",)
    columns = ("reward_chosen", "reward_rejected", "reward_margin", "accuracy")
    dims = SupervisedFineTuning.dims | {"reference": Dims(sequence=1), "pairs": Dims(), "documents": Dims()}

    def batch(self, samples: Sequence[Sample], separators: tuple[int | None, int | None]) -> Batch:
        batch = super().batch(samples, separators)
        learned = batch["documents"].masked_fill(batch["labels"] == IGNORED, -1)
        # the largest number of pairs in a sample: each pair has two documents of at least two tokens
        numbers = torch.arange(self.job.data.seq_len // 4 + 1)
        pairs = torch.stack([torch.isin(2 * numbers, row) for row in learned])
        return Batch(batch.tensors | {"pairs": pairs}, self.dims)

    def count(self, batch: Tensors) -> Tensor:
        return batch["pairs"].sum()

    def loss(self, output: Tensor, batch: Tensors) -> Tensor:
        """Return the summed loss of the pairs. Documents alternate: the preferred answer of a pair, then the rejected
        one; `pairs` says which pairs of documents a sample has.
        """
        # float64, as the loss depends on a small difference between sums in the hundreds
        grown = (self.log_probabilities(output, batch) - batch["reference"]).double()
        samples, per_sample = grown.shape[0], 2 * batch["pairs"].shape[1]
        row = torch.arange(samples, device=grown.device).unsqueeze(1) * per_sample
        # the last document may be padding, without a label
        ids = (row + batch["documents"].clamp(max=per_sample - 1)).flatten()
        sums = torch.zeros(samples * per_sample, dtype=grown.dtype, device=grown.device).index_add(
            0, ids, grown.flatten()
        )
        chosen, rejected = sums.view(samples, -1, 2).unbind(-1)
        margin = self.keys.beta * (chosen - rejected)
        loss = -(F.logsigmoid(margin) * batch["pairs"]).sum().float()
        rewards = self.keys.beta * chosen, self.keys.beta * rejected
        return with_columns(loss, [*rewards, margin, chosen > rejected], batch["pairs"])


class ClippedPolicy(Likelihood):
    """The clipped objective of PPO (arXiv 1707.06347). For each label, its advantage is multiplied by the ratio of its
    probability to its probability at sampling time. There is no gradient once the ratio has left [1 - clip, 1 +
    clip_high] in the direction of the advantage. With `kl`, the divergence from a reference is subtracted from the gain.

    Both divergences are estimated as exp(x) - x - 1 for each label, which is never negative and has no bias
    (http://joschu.net/blog/kl-approx.html): x is log(p / p_old) for kl_old, and log(p_ref / p) for kl_reference.
    """

    entropy = True
    dims = SupervisedFineTuning.dims | {
        name: Dims(sequence=1) for name in ("old_logprobs", "ref_logprobs", "advantages")
    }

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.values = (*logprobs_read(job.objective), "advantages")
        self.columns = ("ratio", "log_ratio_abs", "kl_old", "clip_share", "entropy")
        if "ref_logprobs" in self.values:
            self.columns += ("kl_reference",)

    def loss(self, output: Tensor, batch: Tensors) -> Tensor:
        """Return the negated sum of the clipped gains, with the columns that describe how far the policy has moved."""
        keys, advantages, counts = self.keys, batch["advantages"], batch["labels"] != IGNORED
        logs = self.log_probabilities(output, batch)
        moved = logs - batch["old_logprobs"]
        ratio = moved.exp()
        free = ratio * advantages
        above = keys.clip if keys.clip_high is None else keys.clip_high
        bounded = ratio.clamp(1 - keys.clip, 1 + above) * advantages
        gains = torch.minimum(free, bounded)
        columns = [ratio, moved.abs(), ratio - moved - 1, bounded < free, self.entropies(output)]
        if "ref_logprobs" in batch:
            back = batch["ref_logprobs"] - logs
            columns.append(back.exp() - back - 1)
            if keys.kl:
                gains = gains - keys.kl * columns[-1]
        return with_columns(-(gains * counts).sum(), columns, counts)

    def warnings_of_first_step(self, means: Mapping[str, float]) -> Iterator[str]:
        """Yield a warning if the log-probabilities in the data are not those of the model that the run starts from."""
        moved = means[f"{self.job.objective.name}/log_ratio_abs"]
        if not moved <= MOVED:
            yield (
                f"mean |log ratio| of the first step is {moved:.4g}, more than {MOVED}: the column old_logprobs is not "
                "what this model gives its tokens; other weights, tokenizer, temperature or dtype?"
            )
