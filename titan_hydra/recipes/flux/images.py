"""Captioned images as samples of the objective `diffusion`, with their random numbers; synthetic images of coloured
shapes.

All random numbers of a sample (its place in the epoch, its time and noise, and which caption embeddings are dropped)
follow from the seed and the sample's number, which is step * global batch + slot. So every layout and every resumed run
gets the same samples.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.files import path_of, place_in
from titan_hydra.core.data.items import Numbered, dice_of
from titan_hydra.core.data.opening import OPEN_FILES
from titan_hydra.core.data.permutation import permute
from titan_hydra.core.data.unknown import in_rows
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.files import home, read_json
from titan_hydra.core.job.config.schema import Tokenizer

if TYPE_CHECKING:
    from titan_hydra.core.data import Wanted
    from titan_hydra.core.job.config.schema import Job

    from .config import CaptionSource, EncodedImagesSource, ImageFilesSource

# files in a folder of encoded images, beside images-00000.safetensors and so on
DESCRIPTION, EMPTY = "images.json", "empty.safetensors"
TIMES = 8  # number of fixed times at which validation measures; samples take them in turn


@dataclass(frozen=True)
class Caption:
    """The embeddings of a caption: one per token (T5) and one of the whole (CLIP)."""

    text: np.ndarray  # [tokens, width]
    pooled: np.ndarray  # [width]


@dataclass(frozen=True)
class Example:
    """A captioned image: mean and standard deviation of its latents [channels, side, side], and its caption's
    embeddings.
    """

    mean: np.ndarray
    std: np.ndarray | float
    caption: Caption


class CaptionedImages(Numbered):
    """Makes the sample of a given number from one of `size` examples, which `read` returns by index. `empty` has the
    empty caption's embeddings.
    """

    def __init__(
        self,
        read: Callable[[int], Example],
        size: int,
        empty: Caption,
        seed: int,
        shuffle: bool,
        dropout: float,
        split: str,
    ):
        """Take the examples. `dropout` is the share of samples that are trained with the empty caption."""
        self.read, self.size, self.empty, self.seed, self.shuffle = read, size, empty, seed, shuffle
        self.dropout, self.held_out = dropout, split != "train"
        self.signature = {"images": size}

    def in_epoch(self) -> int:
        return self.size

    def sample(self, number: int, slot: int) -> dict[str, np.ndarray]:
        """Return a sample with its noise and time. A held-out sample has a fixed time and its full caption."""
        epoch, index = divmod(number, self.size)
        example = self.read(permute(index, self.size, self.seed, epoch) if self.shuffle else index)
        dice = dice_of(self.seed, number)
        time, left_out = dice.random(), dice.random(2) < self.dropout
        if self.held_out:
            time, left_out = (number % TIMES + 0.5) / TIMES, (False, False)
        latents = example.mean + example.std * dice.standard_normal(example.mean.shape, dtype=np.float32)
        text, pooled = (self.empty if left else example.caption for left in left_out)
        return {
            "latents": latents.astype(np.float32),
            "noise": dice.standard_normal(latents.shape, dtype=np.float32),
            "time": np.array(time, np.float32),
            "text": text.text,
            "pooled": pooled.pooled,
        }


class EncodedImages:
    """Examples from the files that `titan data encode-images` has written into a folder, by index."""

    def __init__(self, key: str, folder: Path):
        """Read the description. Raises ConfigError if the folder has none, or lacks files that the description lists."""
        described = description_of(key, folder)
        files = [folder / f"images-{number:05d}.safetensors" for number in range(len(described["images"]))]
        if missing := [file for file in (*files, folder / EMPTY) if not file.is_file()]:
            raise ConfigError(f"{key}={folder}: has no {missing[0].name}, which its {DESCRIPTION} lists")
        self.ends = list(accumulate(described["images"]))
        from safetensors import safe_open  # imported here: the rules import this module on login nodes, without torch
        from safetensors.torch import load_file

        self.open = functools.lru_cache(OPEN_FILES)(lambda number: safe_open(files[number], framework="pt"))
        self.empty = Caption(
            *(tensor.float().numpy() for _, tensor in sorted(load_file(folder / EMPTY).items(), reverse=True))
        )

    def read(self, index: int) -> Example:
        number, row = place_in(self.ends, index)
        file = self.open(number)
        mean, std, text, pooled = (
            file.get_slice(name)[row].float().numpy() for name in ("mean", "std", "text", "pooled")
        )
        return Example(mean, std, Caption(text, pooled))


def description_of(key: str, folder: Path) -> dict[str, Any]:
    """Return the description of encoded images. Raises ConfigError if its file is not there."""
    described = read_json(folder / DESCRIPTION)
    if not described or not described.get("images") or "shapes" not in described:
        raise ConfigError(f"{key}={folder}: has no complete {DESCRIPTION}; `titan data encode-images` writes it last")
    return described


def faults(key: str, source: EncodedImagesSource, job: Job) -> Iterator[Fault]:
    """Yield why the model cannot train on the encoded images of a source: another size, or other encoders."""
    model: Any = job.model
    side = model.latent_side(job.data.seq_len)
    needed = {
        "mean": [model.channels, side, side],
        "text": [model.text_len, model.text_dim],
        "pooled": [model.pooled_dim],
    }
    for name in ("path", "validation_path") if job.validation.name == "on" else ("path",):
        if not (path := getattr(source, name)):
            if name == "validation_path":
                yield Fault(f"{key}.{name}", None, f"validation=on with data={source.name} needs it")
            continue
        folder = home(path)
        try:
            shapes = description_of(f"{key}.{name}", folder)["shapes"]
        except ConfigError as error:
            yield Fault(f"{key}.{name}", str(folder), str(error).partition(": ")[2])
            continue
        for tensor, shape in needed.items():
            if shapes.get(tensor) != shape:
                yield Fault(
                    f"{key}.{name}",
                    str(folder),
                    f"{tensor} of an image is {shapes.get(tensor)}; data.seq_len and the model need {shape}",
                )


def faults_of_files(key: str, source: ImageFilesSource, job: Job) -> Iterator[Fault]:
    """Yield the missing libraries and files of the encoders, if images are encoded during the run."""
    wanted = [f"{part}/config.json" for part in ("text_encoder", "text_encoder_2", "vae")]
    if absent := [name for name in ("diffusers", "transformers") if find_spec(name) is None]:
        yield Fault(f"{key}.name", source.name, f"needs {' and '.join(absent)}: pip install -e '.[images]'")
    if not source.encoders:
        yield Fault(f"{key}.encoders", None, f"data={source.name} needs it")
    elif missing := [file for file in wanted if not (home(source.encoders) / file).is_file()]:
        yield Fault(f"{key}.encoders", source.encoders, f"has no {missing[0]}")


def unknown_words(key: str, source: ImageFilesSource, job: Job) -> Iterator[Fault]:
    """Yield a warning about captions that the tokenizer of T5, the second text encoder, encodes as unknown tokens.
    CLIP's tokenizer needs no check, as it has tokens for bytes.
    """
    words = Tokenizer(name="hf", path=str(home(source.encoders or "") / "tokenizer_2" / "tokenizer.json"))
    yield from in_rows(key, source, words, (".jsonl",), "caption")


def open_encoded(key: str, source: EncodedImagesSource, wanted: Wanted, seed: int) -> CaptionedImages:
    """Open images that were encoded before the run."""
    key_of_path, path = path_of(key, source, wanted.split)
    images = EncodedImages(key_of_path, home(path))
    return CaptionedImages(
        images.read, images.ends[-1], images.empty, seed, wanted.job.data.shuffle, source.caption_dropout, wanted.split
    )


COLOURS = {
    "red": (1, -1, -1),
    "green": (-1, 0.6, -1),
    "blue": (-1, -1, 1),
    "yellow": (1, 1, -1),
    "purple": (0.4, -1, 0.8),
    "cyan": (-1, 1, 1),
    "orange": (1, 0.2, -1),
    "black": (-1, -1, -1),
}
SHAPES = ("circle", "square", "triangle", "cross")
CAPTIONS = tuple(f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES)
CELL = 8  # side length in pixels of a latent


def draw_images(key: str, source: CaptionSource, wanted: Wanted, seed: int) -> CaptionedImages:
    """Draw a synthetic image for each of CAPTIONS. The images for validation show the same shapes in other places."""
    model: Any = wanted.job.model
    data = wanted.job.data
    side = model.latent_side(data.seq_len)

    def read(index: int) -> Example:
        pixels = picture(CAPTIONS[index], side * CELL, wanted.drawn(seed))
        return Example(to_cells(pixels, model.channels), 0.0, spoken(CAPTIONS[index], model))

    return CaptionedImages(
        read, len(CAPTIONS), spoken("", model), seed, data.shuffle, source.caption_dropout, wanted.split
    )


def picture(caption: str, side: int, seed: int) -> np.ndarray:
    """Return the image [3, side, side] of a synthetic caption: white, with the shape somewhere near the middle; colours
    are -1 to 1.
    """
    _, colour, kind = caption.split()
    dice = dice_of(seed, CAPTIONS.index(caption))
    x, y = (np.indices((side, side)) + 0.5)[::-1] / side - 0.5 - dice.uniform(-0.08, 0.08, (2, 1, 1))
    size = dice.uniform(0.28, 0.34)
    inside = {
        "circle": x**2 + y**2 < size**2,
        "square": np.maximum(abs(x), abs(y)) < 0.85 * size,
        "triangle": (y < 0.8 * size) & (2 * abs(x) < 0.8 * size + y),
        "cross": (np.maximum(abs(x), abs(y)) < size) & (np.minimum(abs(x), abs(y)) < 0.35 * size),
    }[kind]
    return np.where(inside, np.array(COLOURS[colour])[:, None, None], 1.0).astype(np.float32)


def spoken(caption: str, model: Any) -> Caption:
    """Return embeddings of a synthetic caption without an encoder: a random vector for each word, and their mean."""

    def vector(word: str, width: int) -> np.ndarray:
        key = int.from_bytes(hashlib.blake2b(f"{word} {width}".encode(), digest_size=8).digest(), "little")
        return np.random.Generator(np.random.Philox(key=key)).standard_normal(width, dtype=np.float32)

    every = (caption.split() + [""] * model.text_len)[: model.text_len]
    return Caption(
        np.stack([vector(word, model.text_dim) for word in every]),
        np.mean([vector(word, model.pooled_dim) for word in caption.split() or [""]], axis=0),
    )


def to_cells(pixels: np.ndarray, channels: int) -> np.ndarray:
    """Return latents [channels, side / CELL, side / CELL] of an image [3, side, side]: the lowest frequencies of each
    cell. This is the autoencoder of synthetic images.
    """
    rows = pixels.shape[1] // CELL
    cells = pixels.reshape(3, rows, CELL, rows, CELL).transpose(1, 3, 0, 2, 4).reshape(rows, rows, 3 * CELL * CELL)
    return np.ascontiguousarray((cells @ basis(channels)).transpose(2, 0, 1), dtype=np.float32)


def to_pixels(latents: np.ndarray) -> np.ndarray:
    """Return the image [3, side, side] of latents that `to_cells` has made. It lacks the frequencies that the latents
    do not contain.
    """
    channels, rows, _ = latents.shape
    table = basis(channels)
    cells = latents.transpose(1, 2, 0) @ (table.T / np.maximum((table**2).sum(axis=0), 1e-9)[:, None])
    return cells.reshape(rows, rows, 3, CELL, CELL).transpose(2, 0, 3, 1, 4).reshape(3, rows * CELL, rows * CELL)


def basis(channels: int) -> np.ndarray:
    """Return cosines over a cell for each colour [3 * CELL * CELL, channels], low frequencies first, scaled so that a
    latent is at most about 1.
    """
    angle = (np.arange(CELL) + 0.5) * np.pi / CELL
    waves = np.cos(np.outer(np.arange(CELL), angle))
    table = np.zeros((3, CELL, CELL, channels))
    frequencies = sorted(np.ndindex(CELL, CELL), key=lambda pair: (sum(pair), pair))
    for channel in range(min(channels, table[..., 0].size)):
        down, right = frequencies[channel // 3]
        table[channel % 3, :, :, channel] = (
            np.outer(waves[down], waves[right]) / CELL**2 * (1 if down == right == 0 else 2)
        )
    return table.reshape(-1, channels)
