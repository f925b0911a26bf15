"""The samples of a step on one data-parallel rank, as tensors."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

IGNORED = -100  # the label of a token that does not count


@dataclass
class Batch:
    """This rank's samples of one step, all [slots, seq_len] int64; documents and positions only under data.document_mask."""

    tokens: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def split(self, size: int) -> list[Batch]:
        """Return microbatches of `size` samples, in order."""
        return [self._each(lambda tensor, row=row: tensor[row : row + size]) for row in range(0, len(self.tokens), size)]

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device."""
        return self._each(lambda tensor: onto(device, tensor))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return Batch(*(None if tensor is None else change(tensor) for tensor in (self.tokens, self.labels, self.documents, self.positions)))


def onto(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a host tensor to a device through pinned memory: from pageable memory the host would wait for all work queued there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def cut(tokens: np.ndarray, separators: tuple[int | None, int | None] | None) -> Batch:
    """Split samples [n, S + 1] into inputs and labels; with separators also the document of each token, and its position in it.

    The first token of a document is no label: the text before it does not predict it.
    """
    inputs, labels = tokens[:, :-1], tokens[:, 1:].copy()
    if separators is None:
        return Batch(torch.from_numpy(inputs.copy()), torch.from_numpy(labels))
    begins = _begins(tokens, *separators)
    labels[begins[:, 1:]] = IGNORED
    place = np.arange(inputs.shape[1])
    positions = place - np.maximum.accumulate(np.where(begins[:, :-1], place, 0), axis=1)
    documents = begins[:, :-1].cumsum(axis=1)
    documents -= documents[:, :1]  # a sample's first document is number 0, whether or not it begins there
    return Batch(*map(torch.from_numpy, (inputs.copy(), labels, documents, positions)))


def _begins(tokens: np.ndarray, bos: int | None, eos: int | None) -> np.ndarray:
    """Return True where a document begins: at begin-of-text, or after end-of-text if the tokenizer has no begin-of-text."""
    if bos is not None:
        return tokens == bos
    begins = np.zeros(tokens.shape, dtype=bool)
    if eos is not None:
        begins[:, 1:] = tokens[:, :-1] == eos
    return begins
