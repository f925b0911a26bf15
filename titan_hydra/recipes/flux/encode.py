"""Encode captioned images with frozen encoders: before a run, into files that `data=encoded_images` reads, or during
the run in the data thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.convert import make_target
from titan_hydra.core.data.files import json_of
from titan_hydra.core.job.config.files import home, write_json
from titan_hydra.core.train.generate import device_here

from .encoders import Encoders
from .images import DESCRIPTION, EMPTY, Caption, CaptionedImages, Example

if TYPE_CHECKING:
    from titan_hydra.core.data import Wanted

    from .config import ImageFilesSource


def encode_files(
    lines: Path,
    target: Path,
    encoders: Path,
    size: int,
    text_len: int,
    dtype: torch.dtype,
    batch: int,
    per_file: int,
    show: Callable[[str], None],
) -> dict[str, Any]:
    """Write the latents and embeddings of the captioned images that a .jsonl file lists, and return their description,
    which is written last. Raises ConfigError if the list, an encoder or an image cannot be read.
    """
    listed = list(captioned(lines))
    if missing := [file for file, _ in listed if not file.is_file()]:
        raise ConfigError(f"{lines}: {missing[0]} is not there, the first of {len(missing):,} of {len(listed):,}")
    tools = Encoders(encoders, device_here())
    make_target(target)
    empty = dict(zip(("text", "pooled"), tools.captions([""], text_len), strict=True))
    save_file({name: tensor[0].to("cpu", dtype) for name, tensor in empty.items()}, target / EMPTY)
    counts = []
    for first in range(0, len(listed), per_file):
        part = listed[first : first + per_file]
        rows = [encoded(part[start : start + batch], tools, size, text_len) for start in range(0, len(part), batch)]
        tensors = {name: torch.cat([row[name] for row in rows]).to("cpu", dtype).contiguous() for name in rows[0]}
        save_file(tensors, target / f"images-{len(counts):05d}.safetensors")
        counts.append(len(part))
        show(f"{first + len(part):,} of {len(listed):,} images")
    shapes = {name: list(tensor.shape[1:]) for name, tensor in tensors.items()}
    description = {"images": counts, "shapes": shapes, "size": size, "dtype": str(dtype).removeprefix("torch.")}
    write_json(target / DESCRIPTION, description)
    return description


def captioned(lines: Path) -> Iterator[tuple[Path, str]]:
    """Yield the images and captions of a .jsonl file, {"image": a path beside the file, "caption": text} on each
    line.
    """
    try:
        # as bytes, because a caption may hold other ends of lines, such as U+2028
        rows = lines.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"{lines}: cannot be read ({error})") from error
    if not rows:
        raise ConfigError(f"{lines}: no image is listed in it")
    for number, row in enumerate(rows, start=1):
        try:
            entry = json_of(row)
            yield lines.parent / entry["image"], str(entry["caption"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f'{lines}:{number}: is not {{"image": PATH, "caption": TEXT}} ({error})') from error


def encoded(part: list[tuple[Path, str]], tools: Encoders, size: int, text_len: int) -> dict[str, Tensor]:
    """Return the means and standard deviations of the latents of some images, and their captions' embeddings, in
    float32.
    """
    pixels = torch.from_numpy(np.stack([pixels_of(file, size) for file, _ in part])).to(tools.device)
    mean, std = tools.encode(pixels)
    text, pooled = tools.captions([caption for _, caption in part], text_len)
    return {"mean": mean, "std": std, "text": text, "pooled": pooled}


def caption_of(text: str, tools: Encoders, length: int) -> Caption:
    """Return the embeddings of a caption as samples hold them."""
    return Caption(*(tensor[0].cpu().numpy() for tensor in tools.captions([text], length)))


def pixels_of(file: Path, size: int) -> np.ndarray:
    """Return an image's central square as [3, size, size], with values from -1 to 1. Raises ConfigError if the image
    cannot be read.
    """
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read as an image ({error})") from error
    edge = min(image.size)
    left, top = ((length - edge) // 2 for length in image.size)
    square = image.resize((size, size), Image.Resampling.BICUBIC, box=(left, top, left + edge, top + edge))
    return np.asarray(square, np.float32).transpose(2, 0, 1) / 127.5 - 1


def open_image_files(key: str, source: ImageFilesSource, wanted: Wanted, seed: int) -> CaptionedImages:
    """Encode images one by one in the data thread, on this rank's device. The encoders run in a stream of their own,
    with high priority: in the step's stream each image would wait for all work that is queued there.
    """
    model: Any = wanted.job.model
    tools = Encoders(home(source.encoders), device_here())
    listed = list(captioned(home(source.path if wanted.split == "train" else source.validation_path)))
    side = model.latent_side(wanted.job.data.seq_len) * tools.factor

    stream = torch.cuda.Stream(priority=-1) if tools.device.type == "cuda" else None
    if stream:
        torch.cuda.synchronize()  # waits until the encoders' weights are on the device

    def read(index: int) -> Example:
        with torch.cuda.stream(stream):
            row = {
                name: tensor[0].cpu().numpy()
                for name, tensor in encoded([listed[index]], tools, side, model.text_len).items()
            }
        return Example(row["mean"], row["std"], Caption(row["text"], row["pooled"]))

    empty = caption_of("", tools, model.text_len)
    return CaptionedImages(
        read, len(listed), empty, seed, wanted.job.data.shuffle, source.caption_dropout, wanted.split
    )
