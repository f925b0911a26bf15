"""Images with text as samples: documents in which texts and images alternate, packed by their tokens and patches.

Each image keeps its aspect ratio; it is scaled down to `objective.image_patches` patches if it has more, and each patch
is one token. The size of an image is read from its header, so every rank knows all lengths, and decodes only the images
of its own samples.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import files, unknown
from titan_hydra.core.data.files import json_of
from titan_hydra.core.data.opening import OpenFiles
from titan_hydra.core.data.shards import BadRow, BadShard, BadShards
from titan_hydra.core.data.tokenizer import Tokenizer
from titan_hydra.core.job.config import schema
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.source import FileSource
from titan_hydra.recipes.chat.rows import Chat, ConversationReader, Turns

if TYPE_CHECKING:
    from PIL.Image import Image

    from titan_hydra.core.data import Wanted

SUFFIXES = ("jpg", "jpeg", "png", "webp")
TURNED = 274  # the EXIF tag of the orientation; values from 5 on exchange rows and columns
COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 180, 60),
    "blue": (40, 60, 220),
    "white": (240, 240, 240),
    "black": (10, 10, 10),
}


@dataclass(frozen=True)
class Picture:
    """An image with its size in patches, decoded only when it is used."""

    where: str
    open: Callable[[], Image]
    rows: int
    columns: int

    def patches(self, side: int) -> np.ndarray:
        """Return the patches row by row, as bytes [rows * columns, 3 * side**2]. Raises BadShard if the image is
        damaged.
        """
        from PIL import ImageOps

        try:
            image = self.open()
            image = (ImageOps.exif_transpose(image) if image.format == "JPEG" else image).convert("RGB")
            image = image.resize((self.columns * side, self.rows * side))
        except Exception as error:  # pillow raises many kinds of errors for damaged files
            raise BadRow(self.where, f"cannot be decoded: {error}") from error
        pixels = np.asarray(image).reshape(self.rows, side, self.columns, side, 3)
        return pixels.swapaxes(1, 2).reshape(self.rows * self.columns, -1)


@dataclass(frozen=True)
class Illustrated(Turns):
    """The tokens of a document with images, and for each image the position of its first token."""

    pictures: list[tuple[int, Picture]] = field(default_factory=list)

    @property
    def size(self) -> dict[str, int]:
        return super().size | {"patches": sum(picture.rows * picture.columns for _, picture in self.pictures)}


def cells_of(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of an image's patches. There are at most `most` patches, and the aspect
    ratio is nearly that of the image.
    """
    rows, columns = max(1, round(height / side)), max(1, round(width / side))
    if rows * columns > most:
        scale = math.sqrt(most / (rows * columns))
        rows, columns = min(most, max(1, int(rows * scale))), max(1, int(columns * scale))
        columns = min(columns, most // rows)
    return rows, columns


class TarRows:
    """The samples of webdataset tars, numbered over all tars. A sample's members have the same name up to the first
    dot.
    """

    def __init__(self, files: list[Path], bad: BadShards, most: int | None = None):
        """Find the samples among the first `most` members of each file, or among all members if `most` is None."""
        # (file, name, {suffix: place of the member})
        self.rows: list[tuple[Path, str, dict[str, tuple[int, int]]]] = []
        self.open_files = OpenFiles()
        for file in files:
            try:
                self.rows += _members(file, most)
            except (OSError, tarfile.TarError) as error:
                bad.add(BadShard(file, f"{file}: cannot be read as a plain tar: {error}"))

    def __len__(self) -> int:
        return len(self.rows)

    def row(self, number: int, omit: tuple[str, ...] = ()) -> tuple[str, dict[str, bytes]]:
        """Return the place of a sample, as file:name, and its members. A member with a suffix in `omit` is empty, and
        not read.
        """
        file, name, members = self.rows[number]
        descriptor = self.open_files.descriptor(file)
        return f"{file}:{name}", {
            suffix: b"" if suffix in omit else os.pread(descriptor, size, start)
            for suffix, (start, size) in members.items()
        }


def _members(file: Path, most: int | None) -> list[tuple[Path, str, dict[str, tuple[int, int]]]]:
    """Return the samples of a tar: its file, its name, and for each suffix the offset and size of that member's bytes.
    Members of one sample stand one behind the other, and have one name up to the first dot.
    """
    rows: list[tuple[Path, str, dict[str, tuple[int, int]]]] = []
    with tarfile.open(file, "r:") as tar:
        for member in islice(tar, most):
            folder, _, base = member.name.rpartition("/")
            name, _, suffix = base.partition(".")
            if member.isfile() and name:
                if not rows or rows[-1][1] != f"{folder}/{name}":
                    rows.append((file, f"{folder}/{name}", {}))
                rows[-1][2][suffix.lower()] = member.offset_data, member.size
    return rows


class ImageReader(ConversationReader):
    """Encodes the document of texts and images that has a given number."""

    rows = "documents"
    lines: Any  # a TarRows

    def __init__(self, lines: Any, tokenizer: Tokenizer, side: int, most: int):
        self.lines, self.tokenizer, self.side, self.most = lines, tokenizer, side, most

    @property
    def signature(self) -> dict[str, Any]:
        return {"tokenizer": self.tokenizer.sha256, "patch": self.side, "objective.image_patches": self.most}

    def turns(self, number: int) -> Illustrated:
        where, members = self.lines.row(number)
        try:
            return self.document(parts_of(members), where)
        except (ValueError, OSError) as error:
            raise BadRow(where, error) from error

    def document(self, parts: list[str | Callable[[], Image]], where: str) -> Illustrated:
        """Encode texts and images. Only text is learned. The ids at an image's tokens have no meaning, as the tower's
        output replaces their embeddings.
        """
        tokenizer = self.tokenizer
        ids = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
        trained = [True] * len(ids)
        pictures: list[tuple[int, Picture]] = []  # each with the position of its first token
        for part in parts:
            if isinstance(part, str):
                new = tokenizer.encode(part)
            else:
                picture = self.picture(part, where)
                pictures.append((len(ids), picture))
                new = [tokenizer.eos_id] * (picture.rows * picture.columns)
            ids += new
            trained += [isinstance(part, str)] * len(new)
        return Illustrated(
            np.array([*ids, tokenizer.eos_id], dtype=np.int32), np.array([*trained, True]), pictures=pictures
        )

    def text(self, turns: Turns, begin: int, end: int) -> str:
        sizes = [f"{picture.rows} x {picture.columns}" for offset, picture in turns.pictures if begin <= offset < end]  # type: ignore[attr-defined]
        return "".join(f"[image of {size} patches]" for size in sizes) or super().text(turns, begin, end)

    def picture(self, open: Callable[[], Image], where: str) -> Picture:
        """Return an image with its size, reading only its header."""
        image = open()
        # only a JPEG's orientation is read: reading that of a PNG would decode the image
        turned = image.format == "JPEG" and image.getexif().get(TURNED, 1) >= 5
        width, height = image.size[::-1] if turned else image.size
        return Picture(where, open, *cells_of(height, width, self.side, self.most))


def parts_of(members: dict[str, bytes]) -> list[str | Callable[[], Image]]:
    """Return the texts and images of a sample in order. Raises ValueError if it has neither.

    An image file and a .txt are an image with its caption. A .json has `parts`; each has `text`, or `image` with the
    name of a member.
    """
    if "json" not in members:
        images = [suffix for suffix in members if suffix in SUFFIXES]
        if len(images) != 1 or "txt" not in members:
            raise ValueError(f"neither an image with .txt nor a .json with 'parts', but {', '.join(members)}")
        return [_opener(members[images[0]]), members["txt"].decode()]
    table = json_of(members["json"])
    parts = table.get("parts") if isinstance(table, dict) else None
    if not isinstance(parts, list) or not parts:
        raise ValueError("its .json has no list 'parts'")
    return [_part(part, members) for part in parts]


def _part(part: Any, members: dict[str, bytes]) -> str | Callable[[], Image]:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return part["text"]
    if isinstance(part, dict) and part.get("image") in members:
        return _opener(members[part["image"]])
    raise ValueError(f"its part {part!r} is neither a text nor one of its images")


def _opener(content: bytes) -> Callable[[], Image]:
    def opened() -> Image:
        from PIL import Image

        return Image.open(io.BytesIO(content))

    return opened


class DrawnRows:
    """Numbered documents that code draws: a framed rectangle of any aspect ratio, with a caption. Every fourth document
    has only text, and every eighth has two images.
    """

    def __init__(self, seed: int, number: int):
        self.seed, self.number = seed, number

    def __len__(self) -> int:
        return self.number

    def row(self, number: int) -> tuple[str, int]:
        return f"image {number}", number

    def parts(self, number: int) -> list[str | Callable[[], Image]]:
        """Return the texts and images of a document."""
        dice = np.random.default_rng([self.seed % 2**64, number])
        if number % 4 == 3:
            return [" and ".join(dice.choice([*COLOURS], 4))]
        return [part for _ in range(2 if number % 8 == 4 else 1) for part in self.drawn(dice)]

    def drawn(self, dice: np.random.Generator) -> tuple[Callable[[], Image], str]:
        """Return a rectangle and its caption."""
        frame, filling = dice.choice([*COLOURS], 2, replace=False)
        width, height = (int(side) for side in dice.integers(8, 33, 2))

        def draw() -> Image:
            from PIL import Image

            image = Image.new("RGB", (width, height), COLOURS[frame])
            image.paste(COLOURS[filling], (width // 4, height // 4, width - width // 4, height - height // 4))
            return image

        return draw, f"{filling} in {frame}"


class DrawnReader(ImageReader):
    """Encodes documents that code has drawn. Its `lines` are DrawnRows."""

    def turns(self, number: int) -> Illustrated:
        where, _ = self.lines.row(number)
        return self.document(self.lines.parts(number), where)


class ImageSamples(Chat):
    """Packed samples: the arrays of `Chat`, and those of images: `patches`, `cells`, `images`, `places` (model.py).

    An image that is damaged behind its header becomes black, if data.max_bad_rows allows that. It cannot be left out,
    as all ranks have reserved its place.
    """

    def __init__(self, reader: ImageReader, wanted: Wanted, seed: int):
        super().__init__("data", reader, wanted, seed)
        self.side, self.patches = reader.side, cast(Any, wanted.job.objective).patches
        self.room |= {"patches": self.patches}
        self.limit += f", or objective.patches={self.patches} patches"
        self.signature |= {"objective.patches": self.patches}

    def _filled(self, together: list[Any]) -> dict[str, np.ndarray]:
        """Return the arrays of a packed sample, with the patches of all its images one behind the other: for each patch
        its row, its column and the image's rows and columns (`cells`), its image's number (`images`), and for each
        token of an image the number of its patch (`places`).
        """
        arrays = empty_images(self.seq_len + 1, self.patches, self.side)
        begin, first, number = 0, 0, 0
        for turns in together:
            for offset, picture in turns.pictures:
                rows, columns = picture.rows, picture.columns
                of_picture, numbers = slice(first, first + rows * columns), np.arange(rows * columns)
                try:
                    arrays["patches"][of_picture] = picture.patches(self.side)
                except BadShard as error:
                    self.bad.add(error)
                arrays["cells"][of_picture] = np.stack(
                    [
                        numbers // columns,
                        numbers % columns,
                        np.full_like(numbers, rows),
                        np.full_like(numbers, columns),
                    ],
                    axis=1,
                )
                arrays["images"][of_picture] = number
                arrays["places"][begin + offset : begin + offset + len(numbers)] = first + numbers
                first, number = of_picture.stop, number + 1
            begin += len(turns.tokens)
        return super()._filled(together) | arrays


def empty_images(length: int, patches: int, side: int) -> dict[str, np.ndarray]:
    """Return the arrays of a sample without images."""
    return {
        "patches": np.zeros((patches, 3 * side**2), np.uint8),
        "cells": np.zeros((patches, 4), np.int64),
        "images": np.full(patches, -1, np.int64),
        "places": np.full(length, -1, np.int64),
    }


def open_image_text(key: str, source: FileSource, wanted: Wanted, seed: int) -> ImageSamples:
    """Open the tars of data=image_text. Raises ConfigError if there is no sample in them."""
    key_and_path = files.path_of(key, source, wanted.split)
    rows = TarRows(files.require(*key_and_path, (".tar",)), wanted.bad)
    if not len(rows):
        raise ConfigError("{}={}: no sample in it".format(*key_and_path))
    return ImageSamples(ImageReader(rows, wanted.tokenizer, *_sizes(wanted)), wanted, seed)


def _sizes(wanted: Wanted) -> tuple[int, int]:
    """Return the side of a patch in pixels, and the maximum number of patches of an image."""
    job: Any = wanted.job  # a rule ensures that the family has a tower and that the objective has these keys
    return job.model.vision.patch, job.objective.image_patches


def draw_image_text(key: str, source: schema.Source, wanted: Wanted, seed: int) -> ImageSamples:
    """Draw the documents of data=synthetic_image_text; validation gets other documents."""
    return ImageSamples(
        DrawnReader(DrawnRows(wanted.drawn(seed), 10_000), wanted.tokenizer, *_sizes(wanted)), wanted, seed
    )


def warnings_of_captions(key: str, source: FileSource, job: schema.Job) -> Iterator[Fault]:
    """Yield a warning about texts that the tokenizer encodes as unknown tokens. Imports no torch."""
    return unknown.warning(
        f"{key}.path", source.path, job.tokenizer, lambda: unknown.of_some(source.path, (".tar",), _first_texts)
    )


def _first_texts(file: Path) -> Iterator[str]:
    """Yield the texts of the first samples of a tar. No image is read, and unusable samples are skipped."""
    rows = TarRows([file], BadShards(1), 2 * unknown.ROWS)
    for number in range(len(rows)):
        with contextlib.suppress(ValueError):
            yield from (part for part in parts_of(rows.row(number, omit=SUFFIXES)[1]) if isinstance(part, str))
