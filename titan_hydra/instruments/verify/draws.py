"""Run a reference with other rounding, to measure what rounding changes (judge.DRAWS). The initial weights get other
last bits, samples another order, and linears add up in another order.
"""

import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from titan_hydra.core.data.batch import Batch
from titan_hydra.core.kernels.split_masters import halve_into
from titan_hydra.core.parallel.split_masters import is_split, lower_half, master_of
from titan_hydra.core.train.trainer import Trainer


def disturb(trainer: Trainer, seed: int) -> None:
    """Move every weight of a trainer in one process to the next float32 above or below it, chosen at random by `seed`."""
    dice = torch.Generator().manual_seed(seed)
    for parameter in trainer.masters.weights.parameters():
        value = master_of(parameter)
        up = torch.rand(value.shape, generator=dice).to(value.device) < 0.5
        value = torch.where(
            up, value.nextafter(value.new_tensor(math.inf)), value.nextafter(value.new_tensor(-math.inf))
        )
        if is_split(parameter):
            halve_into(value, parameter.data, lower_half(parameter))
        else:
            parameter.data.copy_(value)


def shuffled(batch: Batch, seed: int, together: int) -> Batch:
    """Return a batch with its samples in an order that is chosen by `seed`, so that sums over samples have another order.
    Each `together` samples stay together. In bfloat16 this is what makes draws differ, as `disturb` changes bits that bfloat16 lacks.
    """
    dice = torch.Generator().manual_seed(seed)
    order = torch.cat([start + torch.randperm(together, generator=dice) for start in range(0, batch.samples, together)])
    return batch.each(lambda tensor, dims: tensor.index_select(dims.samples, order))


class CutLinears(TorchFunctionMode):
    """Computes every linear in parts, as tensor-parallel ranks do. The parts of an output, and those of an input's
    gradient, are rounded to the compute dtype before they are summed.

    The cuts are random, by `seed`: with fixed cuts all draws in bfloat16 would be equal, as bfloat16 lacks the bits
    that `disturb` changes.
    """

    def __init__(self, parts: int, seed: int) -> None:
        super().__init__()
        self.parts, self.dice = parts, random.Random(seed)

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.nn.functional.linear:
            return function(*args, **kwargs or {})
        x, weight, *bias = args
        rows, columns = map(self.cut, weight.shape)
        blocks = zip(x.split(columns, -1), weight.split(columns, 1), strict=True)
        y = sum(torch.cat([function(part, block) for block in across.split(rows)], -1) for part, across in blocks)
        return y + bias[0] if bias and bias[0] is not None else y

    def cut(self, size: int) -> list[int]:
        """Return random sizes that sum to `size`, each from 0.5 to 1.5 times the mean size."""
        even, off = size // self.parts, size // self.parts // 4
        cuts = [even * i + self.dice.randint(-off, off) for i in range(1, self.parts)]
        return [end - start for start, end in pairwise((0, *cuts, size))]
