"""The vision tower and the loss of text with images in float64, image by image, for cases against float64."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_hydra.core.job.config.schema import Job
from titan_hydra.instruments.verify.reference import (
    Routed,
    Weights,
    affine,
    following,
    gelu_by_tanh,
    logs_of_labels,
    standardized,
)

from .config import Vision


def illustrated(weights: Weights, batch: Weights, job: Job, routed: Routed) -> tuple[Tensor, int]:
    """Return the summed cross-entropy of the text's tokens, and their number. For an image's tokens, the tower's output
    replaces the embedding.
    """
    vision: Vision = job.model.vision  # type: ignore[attr-defined]  # of the families with a tower
    tower = {name.removeprefix("vision."): value for name, value in weights.items() if name.startswith("vision.")}
    embeddings = []
    for tokens, patches, cells, images, places in zip(
        *(batch[name] for name in ("tokens", "patches", "cells", "images", "places")), strict=True
    ):
        x = weights["tok_embeddings.weight"][tokens]
        for image in range(int(images.max()) + 1):
            of_image = (images == image).nonzero().flatten()
            height, width = cells[of_image[0], 2:].tolist()
            features = seen_image(tower, patches[of_image].double(), height, width, vision)
            inside = torch.isin(places, of_image)
            x = x.masked_scatter(inside.unsqueeze(-1), features[places[inside] - of_image[0]])
        embeddings.append(x)
    labels = following(batch)
    logs = logs_of_labels(weights, batch, labels, job, routed, torch.stack(embeddings))
    return -logs.sum(), int((labels >= 0).sum())


def seen_image(tower: Weights, pixels: Tensor, rows: int, columns: int, vision: Vision) -> Tensor:
    """Return the features [rows * columns, dim of the decoder] of one image, from its patches' bytes."""
    table = tower["positions.weight"].view(1, -1, vision.grid, vision.grid)
    table = F.interpolate(table, (rows, columns), mode="bilinear", antialias=True)[0]
    x = affine(tower, "patches", pixels / 127.5 - 1) + table.flatten(1).T
    for block in range(vision.n_layers):
        name, width = f"blocks.{block}.", vision.dim // vision.n_heads
        y = normed(tower, f"{name}attention_norm", x)
        q, k, v = (affine(tower, name + part, y).split(width, -1) for part in ("wq", "wk", "wv"))
        seen = [(a @ b.T / math.sqrt(width)).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)]
        x = x + affine(tower, f"{name}wo", torch.cat(seen, -1))
        x = x + affine(
            tower, f"{name}w2", gelu_by_tanh(affine(tower, f"{name}w1", normed(tower, f"{name}ffn_norm", x)))
        )
    return affine(tower, "outer", gelu_by_tanh(affine(tower, "inner", normed(tower, "norm", x))))


def normed(tower: Weights, name: str, x: Tensor) -> Tensor:
    return standardized(x, 1e-6) * tower[f"{name}.weight"] + tower[f"{name}.bias"]
