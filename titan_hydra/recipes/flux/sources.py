"""The keys of the sources of captioned images."""

from __future__ import annotations

from dataclasses import dataclass

from titan_hydra.config.field import key
from titan_hydra.config.ranges import PATH, SHARE
from titan_hydra.config.source import FileSource, Source


@dataclass
class CaptionSource(Source):
    caption_dropout: float = key(
        0.447,
        "share of the captions that are replaced by the empty one, drawn for each text encoder apart, so that samples can be guided",
        SHARE,
    )


@dataclass
class EncodedImagesSource(CaptionSource, FileSource):
    pass


@dataclass
class ImageFilesSource(CaptionSource, FileSource):
    encoders: str | None = key(
        None, "folder with text_encoder, text_encoder_2, vae and two tokenizers, as Hugging Face has them for FLUX", PATH
    )
