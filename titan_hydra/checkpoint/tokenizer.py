"""Export a job's tokenizer as Hugging Face's files: tokenizer.json and tokenizer_config.json, with the same ids for the
same text.

The exported tokenizer follows Hugging Face in two points. It puts begin-of-text before each text, as this package does
before each document. And if a text contains the name of a special token, it encodes this name as that token's id.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from titan_hydra.config import schema
from titan_hydra.config.files import read_json, tokenizer_file
from titan_hydra.data import tokenizer

from .folder import write_content

if TYPE_CHECKING:
    import tokenizers


def write_tokenizer(config: schema.Tokenizer, folder: Path, max_length: int) -> dict[str, int | None]:
    """Write a tokenizer's two files into a folder. Return the ids of begin-of-text and end-of-text, by their names in a
    config.json. Raises ConfigError if the job has no tokenizer.
    """
    ours = tokenizer.load(config)
    theirs = _read(config)
    if ours.bos_id is not None and theirs.encode("").ids[:1] != [ours.bos_id]:
        _begin_with(theirs, ours.bos_id)
    theirs.save(str(folder / "tokenizer.json"))
    beside = read_json(tokenizer_file(config).with_name("tokenizer_config.json")) if config.name == "hf" else None
    bos = {} if ours.bos_id is None else {"bos_token": theirs.id_to_token(ours.bos_id)}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **(beside or {}),
        **bos,
        "eos_token": theirs.id_to_token(ours.eos_id),
        "model_max_length": max_length,
    }
    write_content(folder / "tokenizer_config.json", about)
    return {"bos_token_id": ours.bos_id, "eos_token_id": ours.eos_id}


def _read(config: schema.Tokenizer) -> tokenizers.Tokenizer:
    import tokenizers

    path, content = tokenizer.read_content(config)
    if config.name == "hf":
        return tokenizers.Tokenizer.from_buffer(content)
    return _of_ranks(tokenizer.read_ranks(path, content))


def _of_ranks(ranks: dict[bytes, int]) -> tokenizers.Tokenizer:
    """Build a tokenizer from the ranks of a tokenizer.model. tiktoken always merges the two neighbours whose joined
    bytes have the lowest rank. So every way to cut a token into two tokens is a merge, in the order of the ranks.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    letters = letters_of_bytes()
    names = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = [
        (names[token[:cut]], names[token[cut:]])
        for token in sorted(ranks, key=ranks.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    ]
    made = Tokenizer(models.BPE({names[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(tokenizer.LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in tokenizer.LLAMA3_SPECIALS])
    return made


def letters_of_bytes() -> list[str]:
    """Return for each byte the character that represents it in GPT-2's byte-level vocabulary: the byte's own character
    if it is printable in Latin-1, else the next unused character from code point 256 on.
    """
    seen = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]


def _begin_with(theirs: tokenizers.Tokenizer, bos: int) -> None:
    from tokenizers.processors import TemplateProcessing

    name = theirs.id_to_token(bos)
    theirs.post_processor = TemplateProcessing(
        single=[name, "$A"], pair=[name, "$A", name, "$B:1"], special_tokens=[(name, bos)]
    )
