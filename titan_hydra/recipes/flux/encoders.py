"""FLUX's frozen encoders, which transformers and diffusers read from a folder in Hugging Face's format: text_encoder
(CLIP), text_encoder_2 (T5), vae, and two tokenizers. These libraries are imported only when a folder is opened, as
other runs do not need them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.files import read_json


class Encoders:
    """The text encoders and the autoencoder of a folder, in float32 on a device. Raises ConfigError if one cannot be
    read.
    """

    def __init__(self, folder: Path, device: torch.device):
        """Load the models of a folder. `scale` and `shift` normalize latents; `factor` is the pixels of a latent's
        side.
        """
        try:
            import diffusers
            import transformers
        except ImportError as error:
            raise ConfigError(
                f"{folder}: is read by transformers and diffusers: pip install -e '.[images]' ({error})"
            ) from error
        # warnings of the libraries are suppressed: what they warn about raises a ConfigError here
        for library in (diffusers, transformers):
            library.utils.logging.set_verbosity_error()
            library.utils.logging.disable_progress_bar()
        self.device = device
        self.clip = frozen(transformers.CLIPTextModel, folder / "text_encoder", device)
        self.t5 = frozen(transformers.T5EncoderModel, folder / "text_encoder_2", device)
        self.autoencoder = frozen(diffusers.AutoencoderKL, folder / "vae", device)
        self.clip_tokenizer = tokenizer_in(transformers.CLIPTokenizer, folder / "tokenizer", "vocab.json", "merges.txt")
        self.t5_tokenizer = tokenizer_in(transformers.T5Tokenizer, folder / "tokenizer_2")
        config = self.autoencoder.config
        self.scale, self.shift = config.scaling_factor, config.shift_factor or 0.0
        self.factor = 2 ** (len(config.block_out_channels) - 1)  # side length in pixels of a latent

    @torch.no_grad()
    def captions(self, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
        """Return the embeddings of the first `length` tokens of each text, and of each text as a whole. Padding tokens
        are embedded too, as FLUX is trained with them.
        """
        short = self._ids(self.clip_tokenizer, texts, self.clip.config.max_position_embeddings)
        return self.t5(self._ids(self.t5_tokenizer, texts, length)).last_hidden_state, self.clip(short).pooler_output

    @torch.no_grad()
    def encode(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean and the standard deviation of the latents of images [batch, 3, height, width] with values
        from -1 to 1. The latents are scaled to about unit variance.
        """
        latents = self.autoencoder.encode(images).latent_dist
        return (latents.mean - self.shift) * self.scale, latents.std * self.scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Return the images of scaled latents."""
        return self.autoencoder.decode(latents / self.scale + self.shift).sample

    def _ids(self, tokenizer: Any, texts: list[str], length: int) -> Tensor:
        padded = tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        return padded.input_ids.to(self.device)


def frozen(kind: Any, folder: Path, device: torch.device) -> Any:
    """Read a module of transformers or diffusers from a folder's config.json and safetensors. Raises ConfigError if a
    weight is missing or has another shape; the libraries would replace it by random numbers.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder}: has no config.json")
    # even with use_safetensors, the libraries load a pickle if the index names one
    for index in folder.glob("*.index.json"):
        if not all(
            str(name).endswith(".safetensors") for name in (read_json(index) or {}).get("weight_map", {}).values()
        ):
            raise ConfigError(f"{index}: names files that are not safetensors")
    options = {"use_safetensors": True, "ignore_mismatched_sizes": True, "output_loading_info": True}
    module, report = from_folder(kind, folder, dtype=torch.float32, **options)
    if wrong := sorted([*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])]):
        raise ConfigError(f"{folder}: {wrong[0]} is missing, or has another shape than its config.json asks for")
    return module.eval().requires_grad_(False).to(device)


def tokenizer_in(kind: Any, folder: Path, *older: str) -> Any:
    """Read a tokenizer of transformers from a folder: from its tokenizer.json, or the files of an older format. Raises
    ConfigError if these files are missing; transformers would make a tokenizer without words.
    """
    if not any(names and all((folder / name).is_file() for name in names) for names in (["tokenizer.json"], older)):
        raise ConfigError(f"{folder}: has no {' or '.join(filter(None, ('tokenizer.json', ' with '.join(older))))}")
    return from_folder(kind, folder)


def from_folder(kind: Any, folder: Path, **options: Any) -> Any:
    """Read an object of transformers or diffusers from a folder, never from the hub. Raises ConfigError if that fails."""
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options)
    except Exception as error:  # the libraries raise many kinds of exceptions, some with long texts
        raise ConfigError("{}: cannot be read ({})".format(folder, str(error).partition("\n")[0])) from error
