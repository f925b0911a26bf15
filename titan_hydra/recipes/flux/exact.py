"""FLUX.1 and its loss in float64, written from arXiv 2209.03003, 2403.03206 and the published weights' names, for cases
against float64. Heads and samples are computed one by one.
"""

import math
from typing import Any

import torch
from torch import Tensor

from titan_hydra.core.job.config.schema import Job
from titan_hydra.instruments.verify.reference import Routed, Weights, affine, gelu_by_tanh, rms_norm, standardized


def squared_error(weights: Weights, batch: Weights, job: Job, routed: Routed) -> tuple[Tensor, int]:
    """Return the summed squared difference of the predicted and the real velocity, and the number of values. Time 0 is
    the image, time 1 the noise, with a straight path between them.
    """
    total, number = torch.zeros((), dtype=torch.float64), 0
    for sample in range(len(batch["time"])):
        of_sample = {name: tensor[sample].double() for name, tensor in batch.items()}
        velocity_target = of_sample["noise"] - of_sample["latents"]
        error = (
            velocity(weights, of_sample, of_sample["latents"] + of_sample["time"] * velocity_target, job.model)
            - velocity_target
        )
        total, number = total + (error * error).sum(), number + velocity_target.numel()
    return total, number


def velocity(weights: Weights, sample: Weights, latents: Tensor, model: Any) -> Tensor:
    """Return the velocity of one sample at its time: [tokens, width]."""
    image, words = affine(weights, "img_in", latents), affine(weights, "txt_in", sample["text"])
    condition = embedded(weights, "time_in", waves_of(sample["time"])) + embedded(
        weights, "vector_in", sample["pooled"]
    )
    if model.guidance is not None:
        condition = condition + embedded(weights, "guidance_in", waves_of(torch.tensor(model.guidance).double()))
    condition = silu(condition)
    turns = torch.cat((torch.zeros(len(words), 3).double(), sample["positions"]))
    for layer in range(model.n_layers):
        name = f"layers.{layer}."
        if layer < model.double_layers:
            words, image = double(weights, name, words, image, condition, turns, model)
            continue
        both = torch.cat((words, image)) if layer == model.double_layers else image
        shift, scale, gate = affine(weights, f"{name}modulation", condition).chunk(3)
        h = standardized(both, 1e-6) * (1 + scale) + shift
        seen = attend(*heads(weights, f"{name}heads", h, turns, model))
        joined = torch.cat((seen, gelu_by_tanh(affine(weights, f"{name}w1", h))), -1)
        image = both + gate * affine(weights, f"{name}w2", joined)
    scale, shift = affine(weights, "modulation", condition).chunk(2)
    return affine(weights, "output", standardized(image[-len(latents) :], 1e-6) * (1 + scale) + shift)


def double(
    weights: Weights, name: str, words: Tensor, image: Tensor, condition: Tensor, turns: Tensor, model: Any
) -> tuple[Tensor, Tensor]:
    """Return text and image after a double-stream block: each has weights of its own, and both share one attention."""
    streams, cut = {"txt_": words, "": image}, len(words)
    parts = {side: affine(weights, f"{name}{side}modulation", condition).chunk(6) for side in streams}
    turns_of_side = {"txt_": turns[:cut], "": turns[cut:]}
    triples = [
        heads(
            weights,
            f"{name}{side}heads",
            standardized(x, 1e-6) * (1 + parts[side][1]) + parts[side][0],
            turns_of_side[side],
            model,
        )
        for side, x in streams.items()
    ]
    seen = attend(*(torch.cat(pair, 1) for pair in zip(*triples, strict=True)))
    for side, rows in (("txt_", seen[:cut]), ("", seen[cut:])):
        x = streams[side] + parts[side][2] * affine(weights, f"{name}{side}heads.wo", rows)
        h = standardized(x, 1e-6) * (1 + parts[side][4]) + parts[side][3]
        wide = gelu_by_tanh(affine(weights, f"{name}{side}feed_forward.w1", h))
        streams[side] = x + parts[side][5] * affine(weights, f"{name}{side}feed_forward.w2", wide)
    return streams["txt_"], streams[""]


def heads(weights: Weights, name: str, x: Tensor, turns: Tensor, model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values [heads, tokens, width] of rows x; queries and keys are normalized and rotated."""
    q, k, v = (
        affine(weights, f"{name}.{part}", x).unflatten(-1, (model.n_heads, -1)).transpose(0, 1)
        for part in ("wq", "wk", "wv")
    )
    q, k = (
        rotated(rms_norm(projected, weights[f"{name}.{part}_norm.weight"], 1e-6), turns, model)
        for projected, part in ((q, "q"), (k, "k"))
    )
    return q, k, v


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the attention of all tokens to all tokens, with the heads concatenated: [tokens, heads * width]."""
    return torch.cat([(a @ b.T / math.sqrt(a.shape[-1])).softmax(-1) @ c for a, b, c in zip(q, k, v, strict=True)], -1)


def rotated(x: Tensor, turns: Tensor, model: Any) -> Tensor:
    """Rotate neighbouring elements of heads [heads, tokens, width]; each of the three coordinates rotates its own part
    of a head.
    """
    angles = [
        turns[:, axis] * model.rope_theta ** (-pair / width)
        for axis, width in enumerate(model.rope_axes)
        for pair in range(0, width, 2)
    ]
    turn = torch.polar(torch.ones(len(turns), len(angles)).double(), torch.stack(angles, -1))
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


def waves_of(value: Tensor) -> Tensor:
    """Return 128 cosines and 128 sines of 1000 times the value, at frequencies from 1 down to 1e-4."""
    phases = 1000 * value * 1e-4 ** (torch.arange(128).double() / 128)
    return torch.cat((phases.cos(), phases.sin()))


def embedded(weights: Weights, name: str, x: Tensor) -> Tensor:
    return affine(weights, f"{name}.w2", silu(affine(weights, f"{name}.w1", x)))


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))
