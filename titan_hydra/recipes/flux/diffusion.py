"""Rectified flow (arXiv 2209.03003): from an image mixed with noise, predict the velocity, noise minus image."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from titan_hydra.core.data.batch import Batch, Dims
from titan_hydra.core.data.loader import Sample
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.train.objectives import Objective, Tensors

from .config import PATCH


class Diffusion(Objective):
    """Samples are {latents, noise [channels, side, side], time [], text [text_len, text_dim], pooled [pooled_dim]}; the
    data source has drawn noise and time. In a batch, latents and noise are rows of tokens [samples, tokens, width].
    Every value of the latents is an element.
    """

    dims = {
        "latents": Dims(sequence=1),
        "noise": Dims(sequence=1),
        "positions": Dims(sequence=1),
        "text": Dims(sequence=1),
        "pooled": Dims(),
        "time": Dims(),
    }

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.model: Any = job.model  # the model section of a family that takes latents

    def blank_sample(self) -> Sample:
        """Return a sample of zeros, of the same shapes."""
        model = self.model
        side = model.latent_side(self.job.data.seq_len)
        latents = np.zeros((model.channels, side, side), np.float32)
        return {
            "latents": latents,
            "noise": latents,
            "time": np.zeros((), np.float32),
            "text": np.zeros((model.text_len, model.text_dim), np.float32),
            "pooled": np.zeros(model.pooled_dim, np.float32),
        }

    def batch(self, samples: Sequence[Sample], separators: tuple[int | None, int | None]) -> Batch:
        tensors = {name: torch.from_numpy(np.stack([sample[name] for sample in samples])) for name in samples[0]}
        side = tensors["latents"].shape[-1] // PATCH
        tensors |= {name: as_tokens(tensors[name]) for name in ("latents", "noise")}
        tensors["positions"] = coordinates(side).expand(len(samples), -1, -1).contiguous()
        return Batch(tensors, self.dims)

    def count(self, batch: Tensors) -> torch.Tensor:
        return torch.tensor(batch["latents"].numel(), device=batch["latents"].device)

    def inputs(self, batch: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Return the latents mixed with noise according to the time, and what else the model takes."""
        dtype, time = getattr(torch, self.job.precision.compute_dtype), batch["time"][:, None, None]
        mixed = (1 - time) * batch["latents"] + time * batch["noise"]
        others = {name: batch[name].to(dtype) for name in ("text", "pooled")} | {
            name: batch[name] for name in ("time", "positions")
        }
        if self.model.guidance is not None:
            others["guidance"] = torch.full_like(batch["time"], self.model.guidance)
        return mixed.to(dtype), others

    def loss(self, output: torch.Tensor, batch: Tensors) -> torch.Tensor:
        return (output.float() - (batch["noise"] - batch["latents"])).square().sum()


def as_tokens(latents: torch.Tensor) -> torch.Tensor:
    """Cut latents [..., channels, height, width] into squares, row by row: [..., tokens, channels * PATCH * PATCH]."""
    # [..., channels, rows, PATCH, columns, PATCH]
    squares = latents.unflatten(-1, (-1, PATCH)).unflatten(-3, (-1, PATCH))
    return squares.movedim((-4, -2), (-5, -4)).flatten(-3).flatten(-3, -2)


def as_latents(tokens: torch.Tensor) -> torch.Tensor:
    """Return the latents of a square image from its tokens [..., tokens, width]: the inverse of `as_tokens`."""
    side = round(tokens.shape[-2] ** 0.5)
    # [..., rows, columns, channels, PATCH, PATCH]
    squares = tokens.unflatten(-1, (-1, PATCH, PATCH)).unflatten(-4, (side, side))
    return squares.movedim((-5, -4), (-4, -2)).flatten(-4, -3).flatten(-2)


def coordinates(side: int) -> torch.Tensor:
    """Return the coordinates [tokens, 3] of a square image's tokens: 0, row, column."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), dim=-1).flatten(0, 1)
