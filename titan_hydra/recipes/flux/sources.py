"""The keys of the sources of captioned images."""

from __future__ import annotations

from dataclasses import dataclass

from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.ranges import PATH, SHARE
from titan_hydra.core.job.config.source import FileSource, Source


@dataclass
class CaptionSource(Source):
    caption_dropout: float = key(
        0.447,
        "fraction of captions that the empty caption replaces, drawn for each text encoder independently "
        "(classifier-free guidance)",
        SHARE,
    )


@dataclass
class EncodedImagesSource(CaptionSource, FileSource):
    pass


@dataclass
class ImageFilesSource(CaptionSource, FileSource):
    encoders: str | None = key(
        None,
        "folder of FLUX in Hugging Face's format: text_encoder, text_encoder_2, vae and two tokenizers",
        PATH,
        reads="data",
    )
