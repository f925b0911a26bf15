"""Draw images with a model of rectified flow. Euler steps, opposite to the velocity, lead from noise to an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.convert import read_model_config, reader_of
from titan_hydra.core.data.items import dice_of
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.files import home
from titan_hydra.core.job.run.checkpoints import find_section
from titan_hydra.core.train.generate import device_here, load_model

from .diffusion import as_latents, coordinates
from .encode import caption_of
from .encoders import Encoders
from .images import Caption, spoken, to_pixels


def sample(
    checkpoint: Path,
    prompts: Sequence[str],
    steps: int,
    scale: float,
    shift: float,
    seed: int,
    dtype: str,
    encoders: str | None = None,
) -> list[np.ndarray]:
    """Return an image [side, side, 3] in bytes for each prompt, with a checkpoint's model. `scale` is the guidance
    strength: the weight of classifier-free guidance, or the guidance input of a distilled model. Raises ConfigError if
    the model draws no images.
    """
    config: Any = read_model_config(checkpoint)
    if family_of(config).takes != "latents":
        raise ConfigError(
            f"model.family={config.family}: takes tokens and draws no images; titan generate continues a text"
        )
    _, section = find_section("data", checkpoint)
    tools = None if section["name"] == "synthetic_images" else encoders_of(section, encoders)
    model = load_model(reader_of(checkpoint), config, section["seq_len"], dtype)
    captions = [
        spoken(prompt, config) if tools is None else caption_of(prompt, tools, config.text_len)
        for prompt in ("", *prompts)
    ]
    size = (section["seq_len"] - config.text_len, config.patch_width)
    noise = torch.stack(
        [
            torch.from_numpy(dice_of(seed, number).standard_normal(size, dtype=np.float32))
            for number in range(len(prompts))
        ]
    )
    tokens = flow(model, noise, captions[1:], captions[0], times(steps, shift), scale)
    latents = as_latents(tokens.float())
    if tools is None:
        return [as_bytes(to_pixels(latent.cpu().numpy())) for latent in latents]
    return [as_bytes(tools.decode(latent[None].to(tools.device))[0].cpu().numpy()) for latent in latents]


def encoders_of(section: dict, folder: str | None) -> Encoders:
    """Return the encoders of a folder, or of the folder that the run's data section names. Raises ConfigError if there
    is none.
    """
    if not (named := folder or section.get("encoders")):
        raise ConfigError(
            f"data={section['name']}: prompts and images need the encoders that the run's images had: name the folder with --encoders"
        )
    return Encoders(home(named), device_here())


def times(steps: int, shift: float) -> list[float]:
    """Return the times of the steps from 1 (noise) to 0 (the image). A `shift` above 0 moves the times towards 1, which
    large images need.
    """
    even = [1 - step / steps for step in range(steps + 1)]
    return [math.exp(shift) / (math.exp(shift) + 1 / time - 1) if time else 0.0 for time in even]


@torch.no_grad()
def flow(
    model: nn.Module, noise: Tensor, captions: Sequence[Caption], empty: Caption, times: Sequence[float], scale: float
) -> Tensor:
    """Return the latents into which noise [samples, tokens, width] is transformed for each caption."""
    weight = next(model.parameters())
    text = torch.from_numpy(np.stack([caption.text for caption in captions])).to(weight)
    pooled = torch.from_numpy(np.stack([caption.pooled for caption in captions])).to(weight)
    no_text, no_pooled = (
        torch.from_numpy(row).to(weight).expand_as(rows) for row, rows in ((empty.text, text), (empty.pooled, pooled))
    )
    distilled = getattr(model, "guidance_in", None) is not None
    positions = coordinates(round(noise.shape[1] ** 0.5)).expand(len(captions), -1, -1).to(weight.device)
    guidance = {"guidance": torch.full((len(captions),), scale, device=weight.device)} if distilled else {}
    x = noise.to(weight.device)
    for time, following in pairwise(times):
        now = torch.full((len(captions),), time, device=weight.device)
        velocity = model(x.to(weight), text, pooled, now, positions, **guidance).float()
        if scale != 1 and not distilled:
            blind = model(x.to(weight), no_text, no_pooled, now, positions).float()
            velocity = blind + scale * (velocity - blind)
        x = x + (following - time) * velocity
    return x


def as_bytes(pixels: np.ndarray) -> np.ndarray:
    """Return an image [3, height, width] in the range -1 to 1 as bytes [height, width, 3]."""
    return ((pixels.clip(-1, 1) + 1) * 127.5).round().astype(np.uint8).transpose(1, 2, 0)
