"""FLUX's frozen encoders, read from a folder in Hugging Face's format: text_encoder (CLIP), text_encoder_2 (T5), vae,
and two tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from torch import Tensor, nn

from titan_hydra.base.errors import ConfigError

from .autoencoder import Autoencoder
from .clip import Clip
from .t5 import T5

CLIP_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"


class Encoders:
    """The text encoders and the autoencoder of a folder, in float32 on a device. Raises ConfigError for what cannot be
    read.
    """

    def __init__(self, folder: Path, device: torch.device):
        self.device = device
        self.clip: Clip = read_frozen(Clip, folder / "text_encoder", device)
        self.t5: T5 = read_frozen(T5, folder / "text_encoder_2", device)
        self.autoencoder: Autoencoder = read_frozen(Autoencoder, folder / "vae", device)
        self.clip_words, self.t5_words = words_of(folder / "tokenizer"), words_of(folder / "tokenizer_2")

    @torch.no_grad()
    def captions(self, texts: list[str], length: int) -> tuple[Tensor, Tensor]:
        """Return the embeddings of the first `length` tokens of each text, and of each text as a whole. Padding tokens
        are embedded too, as FLUX is trained with them.
        """
        begin, end = (self.clip_words.token_to_id(f"<|{name}oftext|>") for name in ("start", "end"))
        room = self.clip.positions.num_embeddings
        short = [[begin, *ids[: room - 2], end] for ids in self._ids(self.clip_words, texts)]
        long = [[*ids[: length - 1], self.t5_words.token_to_id("</s>")] for ids in self._ids(self.t5_words, texts)]
        padded = [ids + [end] * (room - len(ids)) for ids in short], [ids + [0] * (length - len(ids)) for ids in long]
        pooled, text = (module(torch.tensor(ids, device=self.device)) for module, ids in zip((self.clip, self.t5), padded, strict=True))
        return text, pooled

    def _ids(self, words: Tokenizer, texts: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in words.encode_batch(texts, add_special_tokens=False)]


def read_frozen(kind: Any, folder: Path, device: torch.device) -> Any:
    """Build a frozen module from a folder's config.json and weights. Raises ConfigError if a weight is missing or has
    another shape.
    """
    try:
        with torch.device("meta"):
            module: nn.Module = kind(json.loads((folder / "config.json").read_text()))
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{folder / 'config.json'}: cannot be read ({type(error).__name__} {error})") from error
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name.removeprefix("text_model."): opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise ConfigError(f"{file}: cannot be read ({error})") from error
    state = {}
    for name, parameter in module.state_dict().items():
        theirs = ".".join(kind.names.get(part, part) for part in name.split("."))
        if theirs not in tensors or tensors[theirs].shape != parameter.shape:
            has = tuple(tensors[theirs].shape) if theirs in tensors else "nothing"
            raise ConfigError(f"{folder}: {theirs} is {has}; its config.json asks for {tuple(parameter.shape)}")
        state[name] = tensors[theirs].float().to(device)
    module.load_state_dict(state, assign=True)
    return module.eval().requires_grad_(False)


def words_of(folder: Path) -> Tokenizer:
    """Return the tokenizer of a folder: its tokenizer.json, or CLIP's vocab.json and merges.txt."""
    try:
        if (folder / "tokenizer.json").is_file():
            return Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocabulary, merges = folder / "vocab.json", folder / "merges.txt"
        words = Tokenizer(models.BPE.from_file(str(vocabulary), str(merges), end_of_word_suffix="</w>", unk_token="<|endoftext|>"))
    except Exception as error:  # tokenizers only raises this class
        raise ConfigError(f"{folder}: has neither a tokenizer.json nor a vocab.json with merges.txt that can be read ({error})") from error
    words.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()])
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(CLIP_WORDS), behavior="removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return words
