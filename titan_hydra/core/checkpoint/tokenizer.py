"""Export what a run carries beside its weights as Hugging Face's files. The tokenizer gives the same ids for the same
text.

The exported tokenizer follows Hugging Face in two points. It puts begin-of-text before each text, as this package does
before each document. And if a text contains the name of a special token, it encodes this name as that token's id.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import tokenizer
from titan_hydra.core.data.facts import DEFAULT, GENERATION, TEMPLATE, TEMPLATES, TOKENIZER, Facts
from titan_hydra.core.job.config import schema

from .folder import write_content

if TYPE_CHECKING:
    import tokenizers


def write_facts(facts: Facts, folder: Path, max_length: int) -> dict[str, Any]:
    """Write what a run carries beside its weights: the tokenizer's two files, chat templates, generation_config.json.
    Return the token ids for config.json. If the tokenizer cannot be had, print a warning and leave its files out.
    """
    for name, text in facts.templates.items():
        path = folder / (TEMPLATE if name == DEFAULT else f"{TEMPLATES}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    try:
        tokenizer_config = facts.words | write_tokenizer(facts, folder)
        length = max(max_length, tokenizer_config.get("model_max_length") or 0)
        write_content(folder / TOKENIZER, dict(sorted((tokenizer_config | {"model_max_length": length}).items())))
    except ConfigError as error:
        print(f"warning: {error}; the export has no tokenizer", file=sys.stderr)
    if facts.generation:
        write_content(folder / GENERATION, dict(sorted(facts.generation.items())))
    return facts.ids


def write_tokenizer(facts: Facts, folder: Path) -> dict[str, Any]:
    """Write tokenizer.json: a run's own file unchanged, if it puts begin-of-text before a text as the run does. Return
    further keys of tokenizer_config.json. Raises ConfigError if the tokenizer cannot be had.
    """
    import tokenizers

    ours = tokenizer.of_facts(facts)
    name = facts.tokenizer["name"]
    config = schema.Tokenizer(name, facts.tokenizer.get("path"))
    path, content = tokenizer.read_content(config)
    theirs = (
        tokenizers.Tokenizer.from_buffer(content) if name == "hf" else _of_ranks(tokenizer.read_ranks(path, content))
    )
    begins = ours.bos_id is None or theirs.encode("").ids[:1] == [ours.bos_id]
    if not begins:
        _begin_with(theirs, ours.bos_id)
    if begins and name == "hf":
        (folder / "tokenizer.json").write_bytes(content)
    else:
        theirs.save(str(folder / "tokenizer.json"))
    defaults = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {key: value for key, value in defaults.items() if key not in facts.words}


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
    built = Tokenizer(models.BPE({names[token]: rank for token, rank in ranks.items()}, merges, ignore_merges=True))
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(tokenizer.LLAMA3_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in tokenizer.LLAMA3_SPECIALS])
    return built


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
