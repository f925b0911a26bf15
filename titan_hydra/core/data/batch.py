"""The samples of a step on one data-parallel rank: tensors by name, each with the dimensions along which it may be
cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Dims:
    """The dimensions of a tensor along which a batch is cut."""

    samples: int = 0  # the dimension of samples, which microbatches cut
    # the dimension that context parallelism cuts; None: there is none, or each rank needs the whole tensor
    sequence: int | None = None
    host: bool = False  # whether the tensor stays on the host, as neither the model nor the loss reads it


@dataclass(frozen=True)
class Batch:
    """The tensors of some samples."""

    tensors: dict[str, torch.Tensor]
    dims: Mapping[str, Dims]  # the dimensions of each tensor; further names are allowed

    def __post_init__(self) -> None:
        if missing := self.tensors.keys() - self.dims.keys():
            raise ValueError(f"no dimensions are declared for {', '.join(sorted(missing))}")
        numbers = {name: tensor.shape[self.dims[name].samples] for name, tensor in self.tensors.items()}
        if len(set(numbers.values())) != 1:
            raise ValueError(f"the tensors of a batch hold different numbers of samples: {numbers}")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.tensors[name]

    @property
    def samples(self) -> int:
        name, tensor = next(iter(self.tensors.items()))
        return tensor.shape[self.dims[name].samples]

    def split(self, size: int) -> list[Batch]:
        """Return batches of `size` samples each, in order."""
        pieces = [tensor.split(size, self.dims[name].samples) for name, tensor in self.tensors.items()]
        return [Batch(dict(zip(self.tensors, row, strict=True)), self.dims) for row in zip(*pieces, strict=True)]

    def of_sequences(self, index: Callable[[int], torch.Tensor]) -> Batch:
        """Return the batch with only some elements of every sequence: those at the indices that `index(length)`
        returns, in the order of these indices.
        """

        def part(tensor: torch.Tensor, dims: Dims) -> torch.Tensor:
            if dims.sequence is None:
                return tensor
            return tensor.index_select(dims.sequence, index(tensor.shape[dims.sequence]))

        return self.each(part)

    def to(self, device: torch.device) -> Batch:
        """Return the batch on a device, without the tensors that stay on the host."""
        return Batch(
            {name: onto(device, tensor) for name, tensor in self.tensors.items() if not self.dims[name].host}, self.dims
        )

    def each(self, change: Callable[[torch.Tensor, Dims], torch.Tensor]) -> Batch:
        """Return the batch with `change(tensor, dims)` in place of every tensor."""
        return Batch({name: change(tensor, self.dims[name]) for name, tensor in self.tensors.items()}, self.dims)


def onto(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """Copy a host tensor to a device through pinned memory; from pageable memory the host would wait for all work that
    is queued on the device.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
