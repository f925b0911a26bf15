"""Language modelling: every token of a packed text is predicted from the tokens before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from titan_hydra.core.data.batch import Batch, Dims
from titan_hydra.core.data.loader import Sample

from . import Objective, Tensors

NOTHING: Mapping[int, np.ndarray] = {}
IGNORED = -100  # the label of a token that does not count


class Language(Objective):
    """Samples are {tokens [seq_len + 1]}, some with the number of each token's document. A batch has tokens and labels and,
    if they are used, positions, documents and the documents' ends.
    """

    # Context parallelism does not cut `documents`: only Ulysses supports them, and with Ulysses each rank's attention
    # sees whole sequences.
    dims = {
        "tokens": Dims(sequence=1),
        "labels": Dims(sequence=1),
        "positions": Dims(sequence=1),
        "documents": Dims(host=True),
        "ends": Dims(),
        "ahead": Dims(sequence=1),
        "ahead_labels": Dims(sequence=1),
    }

    def blank_sample(self) -> Sample:
        return {"tokens": np.full(self.job.data.seq_len + 1, IGNORED, dtype=np.int64)}

    def batch(self, samples: Sequence[Sample], separators: tuple[int | None, int | None]) -> Batch:
        tokens = np.stack([sample["tokens"] for sample in samples]).astype(np.int64)
        numbered = {row: sample["documents"] for row, sample in enumerate(samples) if "documents" in sample}
        return self.assembled(cut(tokens, separators if self.job.data.document_mask else None, numbered))

    def assembled(self, arrays: dict[str, np.ndarray]) -> Batch:
        """Return arrays as a batch, with positions if context parallelism needs them, and what further predictions need."""
        # without `positions`, the model would number each rank's part of a sequence from 0
        if self.job.parallelism.cp > 1 and "positions" not in arrays:
            arrays["positions"] = np.broadcast_to(np.arange(arrays["tokens"].shape[1]), arrays["tokens"].shape).copy()
        if depth := self.job.model.predictions - 1:
            arrays |= further(arrays, depth)
        return Batch({name: torch.from_numpy(array) for name, array in arrays.items()}, self.dims)

    def count(self, batch: Tensors) -> torch.Tensor:
        return (batch["labels"] != IGNORED).sum()

    def inputs(self, batch: Tensors) -> tuple[torch.Tensor, Tensors]:
        others: Tensors = {name: batch[name] for name in ("positions", "ends", "ahead") if name in batch}
        if self.job.loss.name == "linear_cross_entropy":
            others["targets"] = batch["labels"]
        return batch["tokens"], others

    def loss(self, output: torch.Tensor, batch: Tensors) -> torch.Tensor:
        """Return the summed loss. With linear_cross_entropy, the head has already computed it from the targets
        (core/parallel/loss_head.py). In training, further predictions (model.mtp) follow along the batch.
        """
        if self.job.loss.name == "linear_cross_entropy":
            return output
        labels = batch["labels"]
        if len(output) == len(labels):
            return cross_entropy(output, labels)
        model: Any = self.job.model
        main, others = output.split([len(labels), len(output) - len(labels)])
        later = cross_entropy(others, torch.cat(batch["ahead_labels"].unbind(-1)))
        return cross_entropy(main, labels) + model.mtp_weight / model.mtp * later


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the summed cross-entropy of logits [batch, seq, vocab] for labels [batch, seq], computed in float32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), ignore_index=IGNORED, reduction="sum")


def cut(
    tokens: np.ndarray, separators: tuple[int | None, int | None] | None, numbered: Mapping[int, np.ndarray] = NOTHING
) -> dict[str, np.ndarray]:
    """Split samples [n, S + 1] into tokens and labels. A token that is IGNORED is token 0, and no label. With separators,
    also return for each token the number of its document, and its position in the document. `numbered` has the documents
    of samples of which they are known.

    The first token of a document is not a label, as the text before it belongs to another document.
    """
    inputs, labels = tokens[:, :-1], tokens[:, 1:].copy()
    inputs = np.where(inputs == IGNORED, 0, inputs)  # contiguous, as pipelines of torch 2.11 demand
    if separators is None:
        return {"tokens": inputs, "labels": labels}
    begins = _begins(tokens, *separators)
    for row, documents in numbered.items():
        begins[row] = np.diff(documents, prepend=documents[:1]) != 0
    labels[begins[:, 1:]] = IGNORED
    numbers = begins[:, :-1].cumsum(axis=1)
    numbers -= numbers[:, :1]  # a sample's first document is number 0, even if it begins in an earlier sample
    return {"tokens": inputs, "labels": labels} | packed(numbers)


def packed(documents: np.ndarray) -> dict[str, np.ndarray]:
    """Return the documents [n, seq] of samples, the position of each token in its document, and the position at which
    each document ends.
    """
    positions_in_row = np.arange(documents.shape[1])
    begins = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0
    positions = positions_in_row - np.maximum.accumulate(np.where(begins, positions_in_row, 0), axis=1)
    return {"documents": documents, "positions": positions, "ends": ends_of(documents)}


def ends_of(documents: np.ndarray) -> np.ndarray:
    """Return the positions [n, m] at which the documents of samples [n, seq] end. A row with fewer than m documents is
    filled with seq.

    The kernels are launched for m documents. The host knows m without waiting for the device, and empty documents cost
    little. m is a power of two up to 16, and above that a multiple of 16. torch.compile compiles for the first m, and
    then once for all other m.
    """
    last = np.ones(documents.shape, bool)
    last[:, :-1] = documents[:, 1:] != documents[:, :-1]
    number = last.cumsum(axis=1)
    most = int(number.max())
    step = min(1 << (most - 1).bit_length(), 16)
    ends = np.full((len(documents), -(-most // step) * step), documents.shape[1], np.int32)
    row, position = last.nonzero()
    ends[row, number[row, position] - 1] = position + 1
    return ends


def further(arrays: Mapping[str, np.ndarray], depth: int) -> dict[str, np.ndarray]:
    """Return for each place of samples [n, seq] the tokens 1 to `depth` places ahead, and the label of each: the token
    that follows it. A label does not count if it is behind the sample's last label or in another document.
    """
    tokens, labels = arrays["tokens"], arrays["labels"]
    documents = arrays.get("documents", np.zeros_like(tokens))
    ahead = np.zeros((*tokens.shape, depth), np.int64)
    later = np.full((*tokens.shape, depth), IGNORED, np.int64)
    for number in range(depth):
        left = tokens.shape[1] - number - 1
        ahead[:, :left, number] = tokens[:, number + 1 :]
        same = documents[:, number + 1 :] == documents[:, :left]
        later[:, :left, number] = np.where(same, labels[:, number + 1 :], IGNORED)
    return {"ahead": ahead, "ahead_labels": later}


def _begins(tokens: np.ndarray, bos: int | None, eos: int | None) -> np.ndarray:
    """Return for each token whether a document begins there: at begin-of-text or, if the tokenizer has none, after
    end-of-text.
    """
    if bos is not None:
        return tokens == bos
    begins = np.zeros(tokens.shape, dtype=bool)
    if eos is not None:
        begins[:, 1:] = tokens[:, :-1] == eos
    return begins
