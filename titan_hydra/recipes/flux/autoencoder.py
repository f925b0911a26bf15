"""The autoencoder of FLUX (arXiv 2112.10752): images to latents an eighth as wide, and back. It is not trained here."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EPSILON = 1e-6


class Autoencoder(nn.Module):
    """Images [batch, 3, height, width] of -1 to 1 to the mean and the standard deviation of their latents, scaled to
    about unit variance, and latents to images.
    """

    names = {
        "down": "down_blocks",
        "up": "up_blocks",
        "parts": "resnets",
        "shrink": "downsamplers.0.conv",
        "grow": "upsamplers.0.conv",
        "middle": "mid_block",
        "first": "resnets.0",
        "attention": "attentions.0",
        "second": "resnets.1",
        "norm": "conv_norm_out",
        "enter": "conv_in",
        "leave": "conv_out",
        "shortcut": "conv_shortcut",
        "wq": "to_q",
        "wk": "to_k",
        "wv": "to_v",
        "wo": "to_out.0",
    }

    def __init__(self, config: dict):
        super().__init__()
        self.scale, self.shift = config["scaling_factor"], config.get("shift_factor") or 0.0
        self.factor = 2 ** (len(config["block_out_channels"]) - 1)  # side length in pixels of a latent
        self.encoder, self.decoder = Downwards(config), Upwards(config)
        self.quant_conv = nn.Conv2d(2 * config["latent_channels"], 2 * config["latent_channels"], 1) if config["use_quant_conv"] else None
        self.post_quant_conv = nn.Conv2d(config["latent_channels"], config["latent_channels"], 1) if config["use_post_quant_conv"] else None

    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        moments = self.encoder(images)
        mean, logarithm = (moments if self.quant_conv is None else self.quant_conv(moments)).chunk(2, dim=1)
        return (mean - self.shift) * self.scale, torch.exp(0.5 * logarithm.clamp(-30, 20)) * self.scale

    def decode(self, latents: Tensor) -> Tensor:
        latents = latents / self.scale + self.shift
        return self.decoder(latents if self.post_quant_conv is None else self.post_quant_conv(latents))


class Downwards(nn.Module):
    """The encoder's convolutions, which halve the size at the end of all levels but the last."""

    def __init__(self, config: dict):
        super().__init__()
        widths, groups, layers = config["block_out_channels"], config["norm_num_groups"], config["layers_per_block"]
        self.enter = nn.Conv2d(config["in_channels"], widths[0], 3, padding=1)
        self.down = nn.ModuleList(
            Level(before, width, layers, groups, "shrink" if place < len(widths) - 1 else None)
            for place, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False))
        )
        self.middle = Middle(widths[-1], groups)
        self.norm = nn.GroupNorm(groups, widths[-1], eps=EPSILON)
        self.leave = nn.Conv2d(widths[-1], 2 * config["latent_channels"], 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for level in self.down:
            x = level(x)
        return self.leave(F.silu(self.norm(self.middle(x))))


class Upwards(nn.Module):
    """The decoder's: the same levels in reverse order, each with one residual block more."""

    def __init__(self, config: dict):
        super().__init__()
        widths, groups, layers = config["block_out_channels"][::-1], config["norm_num_groups"], config["layers_per_block"] + 1
        self.enter = nn.Conv2d(config["latent_channels"], widths[0], 3, padding=1)
        self.middle = Middle(widths[0], groups)
        self.up = nn.ModuleList(
            Level(before, width, layers, groups, "grow" if place < len(widths) - 1 else None)
            for place, (before, width) in enumerate(zip((widths[0], *widths), widths, strict=False))
        )
        self.norm = nn.GroupNorm(groups, widths[-1], eps=EPSILON)
        self.leave = nn.Conv2d(widths[-1], config["out_channels"], 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(self.enter(x))
        for level in self.up:
            x = level(x)
        return self.leave(F.silu(self.norm(x)))


class Level(nn.Module):
    """Residual blocks of one size, then a change of the size: `shrink`, `grow` or none."""

    def __init__(self, before: int, width: int, layers: int, groups: int, change: str | None):
        super().__init__()
        self.parts = nn.ModuleList(Residual(width if place else before, width, groups) for place in range(layers))
        self.shrink = nn.Conv2d(width, width, 3, stride=2) if change == "shrink" else None
        self.grow = nn.Conv2d(width, width, 3, padding=1) if change == "grow" else None

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        if self.shrink is not None:
            return self.shrink(F.pad(x, (0, 1, 0, 1)))
        return x if self.grow is None else self.grow(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, before: int, width: int, groups: int):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(groups, before, eps=EPSILON), nn.GroupNorm(groups, width, eps=EPSILON)
        self.conv1, self.conv2 = nn.Conv2d(before, width, 3, padding=1), nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Conv2d(before, width, 1) if before != width else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return h + (x if self.shortcut is None else self.shortcut(x))


class Middle(nn.Module):
    """Attention over all positions, between two residual blocks."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.first, self.second = (Residual(width, width, groups) for _ in range(2))
        self.attention = Places(width, groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.attention(self.first(x)))


class Places(nn.Module):
    """Single-head attention over the positions of an image, added to its input."""

    def __init__(self, width: int, groups: int):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, width, eps=EPSILON)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width) for _ in "qkvo")

    def forward(self, x: Tensor) -> Tensor:
        h = self.group_norm(x).flatten(2).mT
        h = F.scaled_dot_product_attention(*(linear(h).unsqueeze(1) for linear in (self.wq, self.wk, self.wv))).squeeze(1)
        return x + self.wo(h).mT.unflatten(2, x.shape[2:])
