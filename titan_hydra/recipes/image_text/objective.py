"""Texts with images: every token of the texts is predicted from the texts and images before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_hydra.core.data.batch import Batch, Dims
from titan_hydra.core.data.loader import Sample
from titan_hydra.core.train.objectives import Tensors
from titan_hydra.recipes.chat.objective import SupervisedFineTuning

from .images import empty_images


class ImageText(SupervisedFineTuning):
    """Samples have the arrays of fine-tuning's samples and the arrays of their images. All context-parallel ranks run
    the tower on all images of a sample, but use only the patches in their part of the text. So the sum of the ranks'
    gradients is the whole gradient.
    """

    dims = SupervisedFineTuning.dims | {
        "patches": Dims(),
        "cells": Dims(),
        "images": Dims(),
        "places": Dims(sequence=1),
    }

    def blank_sample(self) -> Sample:
        model: Any = self.job.model  # the model section of a family with a tower
        return super().blank_sample() | empty_images(self.job.data.seq_len + 1, self.keys.patches, model.vision.patch)

    def batch(self, samples: Sequence[Sample], separators: tuple[int | None, int | None]) -> Batch:
        images = {
            name: torch.from_numpy(np.stack([sample[name] for sample in samples]))
            for name in ("patches", "cells", "images")
        }
        images["places"] = torch.from_numpy(np.stack([sample["places"][:-1] for sample in samples]))
        return Batch(super().batch(samples, separators).tensors | images, self.dims)

    def inputs(self, batch: Tensors) -> tuple[Tensor, Tensors]:
        first, others = super().inputs(batch)
        return first, others | {name: batch[name] for name in ("patches", "cells", "images", "places")}
