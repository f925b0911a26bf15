"""Convert text to token ids and back, with the tokenizer that tokenizer.name chooses: the embedded one, a tokenizer.model
of Llama 3's kind, or a tokenizer.json.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import schema
from titan_hydra.core.job.config.files import LLAMA3_SPECIALS, size_of_hf, tokenizer_file

from .facts import Facts, is_digest, listed, read_facts, token_of

if TYPE_CHECKING:
    import numpy as np
    import tokenizers

# How Llama 3 cuts text into words before it merges bytes.
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# A text is cut after this number of consecutive blanks, as tiktoken's regular expression fails with a Rust panic at
# about a million.
MANY_BLANKS = 400_000
LONG_RUN = re.compile(rf"(\s{{{MANY_BLANKS}}})")

BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "<|startoftext|>", "[BOS]")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "<|endoftext|>", "[EOS]")


@dataclass(frozen=True)
class Located:
    """Tokens, and for each the range of its characters. If a token contains only some of a character's bytes, its range
    includes the whole character.
    """

    ids: list[int]
    begins: np.ndarray
    ends: np.ndarray


@dataclass(frozen=True)
class Tokenizer:
    """The functions and special ids of a tokenizer of any library."""

    encode: Callable[[str], list[int]]  # encodes a text; names of special tokens in the text count as plain text
    decode: Callable[[list[int]], str]
    vocab_size: int
    bos_id: int | None  # begin-of-text; None if documents have none
    eos_id: int  # end-of-text
    sha256: str  # SHA-256 of the tokenizer's file
    locate: Callable[[str], Located]  # encodes a text; the names of special tokens in the text become special tokens
    special: dict[str, int] = field(default_factory=dict)  # ids of the special tokens by name
    added: dict[str, int] = field(default_factory=dict)  # ids of all tokens beside the vocabulary, special or not
    id_of: Callable[[str], int | None] = lambda name: None  # the id of a token by its name
    name_of: Callable[[int], str | None] = lambda id: None  # the name of a token that is no plain text
    unknown: int | None = None  # id of text that has no token; None if all text has tokens

    def document(self, text: str) -> list[int]:
        """Return a document as the model sees it: begin-of-text, the text, end-of-text."""
        return [*([] if self.bos_id is None else [self.bos_id]), *self.encode(text), self.eos_id]


def load(config: schema.Tokenizer, facts: Facts | None = None) -> Tokenizer:
    """Load the tokenizer of a job. `facts` names the special tokens of a tokenizer.json (default: the files beside it).
    Raises ConfigError if its file is missing, or is not of the kind that tokenizer.name states.
    """
    path, content = read_content(config)
    if config.name == "hf":
        return _load_hf(path, content, facts or read_facts(path.parent))
    return _load_tiktoken(path, content)


def of_facts(facts: Facts, file: Path | None = None) -> Tokenizer:
    """Load the tokenizer whose ids a model has learned. `file` is its file, if the user has named one. Raises
    ConfigError if the file is not known, or is another tokenizer's.
    """
    learned = facts.tokenizer
    name = learned.get("name") if file is None else name_by_suffix(file)
    digest = learned.get("sha256")
    if name is None:
        which = f" (SHA-256 {digest})" if digest else ""
        raise ConfigError(
            f"the tokenizer whose ids the model has learned{which} is not known here: name its file with --tokenizer"
        )
    loaded = load(
        schema.Tokenizer(name, learned.get("path") if file is None else str(file)), facts if file is None else None
    )
    if is_digest(digest) and loaded.sha256 != digest:
        key = f"--tokenizer={file}" if file else f"tokenizer.path={learned.get('path')}"
        raise ConfigError(f"{key}: SHA-256 {loaded.sha256}; the model has learned the ids of another one, of {digest}")
    return replace(loaded, bos_id=learned["bos_id"], eos_id=learned["eos_id"]) if "eos_id" in learned else loaded


def name_by_suffix(file: Path) -> str:
    """Return the tokenizer.name that reads a file: by its suffix."""
    return "hf" if file.suffix == ".json" else "tiktoken"


def read_content(config: schema.Tokenizer) -> tuple[Path, bytes]:
    """Return the path and the bytes of the file that defines a tokenizer. Raises ConfigError if it is not named or
    unreadable.
    """
    if config.name != "embedded" and not config.path:
        wanted = "tokenizer.json" if config.name == "hf" else "tokenizer.model"
        raise ConfigError(f"tokenizer.path=null: tokenizer={config.name} needs the path of a {wanted}")
    path = tokenizer_file(config)
    try:
        return path, path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tokenizer.path={path}: {error.strerror}") from error


def _load_tiktoken(path: Path, content: bytes) -> Tokenizer:
    """Build the tokenizer of a tokenizer.model in tiktoken's format, with the special tokens and the splitting of Llama
    3.
    """
    import numpy as np
    import tiktoken

    ranks = read_ranks(path, content)
    specials = {name: len(ranks) + i for i, name in enumerate(LLAMA3_SPECIALS)}
    encoding = tiktoken.Encoding(path.name, pat_str=LLAMA3_SPLIT, mergeable_ranks=ranks, special_tokens=specials)

    def encode(text: str) -> list[int]:
        if len(text) < MANY_BLANKS:
            return encoding.encode_ordinary(text)
        return [token for part in LONG_RUN.split(text) for token in encoding.encode_ordinary(part)]

    # number of bytes of each id
    sizes = np.array([*map(len, sorted(ranks, key=ranks.__getitem__)), *map(len, specials)])

    def locate(text: str) -> Located:
        """Encode a text with special tokens, and return for each token the characters where it begins and ends."""
        if LONG_RUN.search(text):
            raise ValueError(f"{MANY_BLANKS:,} blanks in a row")
        ids = encoding.encode(text, allowed_special="all")
        ends = np.cumsum(sizes[ids])
        # whether a byte is the first of a character
        first = np.frombuffer(text.encode(), dtype=np.uint8) & 0xC0 != 0x80
        characters = np.cumsum(first)
        return Located(ids, characters[np.concatenate([[0], ends[:-1]])] - 1, characters[ends - 1])

    return Tokenizer(
        encode,
        encoding.decode,
        len(ranks) + len(specials),
        bos_id=specials["<|begin_of_text|>"],
        eos_id=specials["<|end_of_text|>"],
        sha256=hashlib.sha256(content).hexdigest(),
        locate=locate,
        special=specials,
        added=specials,
        id_of=specials.get,
        name_of={id: name for name, id in specials.items()}.get,
    )


def read_ranks(path: Path, content: bytes) -> dict[bytes, int]:
    """Return the rank of each token (bytes). Raises ConfigError if the ranks are not 0, 1, 2, ..., because the ids of
    special tokens follow the last rank.
    """
    try:
        lines = [line.split() for line in content.splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except (ValueError, binascii.Error) as error:
        raise ConfigError(
            f"tokenizer.path={path}: not a tokenizer.model (lines of base64 token and rank)"
            + ("; for a tokenizer.json take tokenizer=hf" if path.suffix == ".json" else "")
        ) from error
    if len(ranks) < 256 or sorted(ranks.values()) != list(range(len(ranks))):
        raise ConfigError(
            f"tokenizer.path={path}: a tokenizer.model ranks 256 bytes or more from 0 without gaps, this one {len(ranks)}"
        )
    return ranks


def _load_hf(path: Path, content: bytes, facts: Facts) -> Tokenizer:
    """Build the tokenizer of a tokenizer.json. `facts` is what other files of its folder add, such as the end of text."""
    import numpy as np
    import tokenizers

    spec = _json(path, content)
    try:
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the library raises no class other than Exception
        raise ConfigError(f"tokenizer.path={path}: not a tokenizer.json: {error}") from error
    # so that `</s>` in a text is treated as text, and not as the end of a document
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    added = tokenizer.get_added_tokens_decoder()
    special = {token.content: id for id, token in added.items() if token.special}
    _check_added(facts, tokenizer, path)

    @functools.cache
    def with_specials() -> tokenizers.Tokenizer:
        other = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        other.encode_special_tokens = False
        other.post_processor = None  # a post-processor may leave blanks out of the ranges of tokens
        return other

    def locate(text: str) -> Located:
        encoding = with_specials().encode(text, add_special_tokens=False)
        begins, ends = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2).T
        return Located(encoding.ids, begins, ends)

    bos, eos = _begin(tokenizer, facts), _end(tokenizer, facts)
    if eos is None:
        raise ConfigError(
            f"tokenizer.path={path}: no end-of-text token: none of {', '.join(EOS_NAMES)}, "
            "and no eos_token in a tokenizer_config.json beside it"
        )
    return Tokenizer(
        lambda text: tokenizer.encode(text, add_special_tokens=False).ids,
        lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        size_of_hf(spec),
        bos_id=None if bos == eos else bos,  # GPT-2 has one token for both; it stands once between documents
        eos_id=eos,
        sha256=hashlib.sha256(content).hexdigest(),
        locate=locate,
        special=special,
        added={token.content: id for id, token in added.items()},
        id_of=tokenizer.token_to_id,
        name_of=tokenizer.id_to_token,
        unknown=_unknown(tokenizer, spec["model"]),
    )


def _unknown(tokenizer: tokenizers.Tokenizer, model: dict) -> int | None:
    """Return the id of unknown text, which the model of a tokenizer.json names by its id or by its text."""
    return model["unk_id"] if model.get("unk_id") is not None else tokenizer.token_to_id(model.get("unk_token") or "")


def _begin(tokenizer: tokenizers.Tokenizer, facts: Facts) -> int | None:
    """Return the id of begin-of-text: the one that the folder names, None if it names none or does not put it before
    texts. Without a word of the folder, it is the first of BOS_NAMES that the vocabulary has.
    """
    if facts.words.get("add_bos_token") is False:
        return None
    if "bos_token" in facts.words:
        token = token_of(facts.words, "bos_token")
        return None if token is None else tokenizer.token_to_id(token)
    return next((id for name in BOS_NAMES if (id := tokenizer.token_to_id(name)) is not None), None)


def _end(tokenizer: tokenizers.Tokenizer, facts: Facts) -> int | None:
    """Return the id of end-of-text, which ends documents. The folder's words come first: its eos_token and the ids that
    end a generation. A chat model's also end turns, so among several the first is taken that has a usual name.
    """
    named = token_of(facts.words, "eos_token")
    first = None if named is None else tokenizer.token_to_id(named)
    stated = [id for id in listed(first, facts.stops) if tokenizer.id_to_token(id) is not None]
    if not stated:
        return next((id for name in EOS_NAMES if (id := tokenizer.token_to_id(name)) is not None), None)
    padding = token_of(facts.words, "pad_token")  # chat models often pad with what ended a document before
    candidates = {padding, *map(tokenizer.id_to_token, stated)}
    usual = next((name for name in EOS_NAMES if name in candidates), "")
    id_of_usual = tokenizer.token_to_id(usual)
    return stated[0] if id_of_usual is None else id_of_usual


def _check_added(facts: Facts, tokenizer: tokenizers.Tokenizer, path: Path) -> None:
    """Raise ConfigError if tokenizer_config.json has added tokens that tokenizer.json has not, or under another id."""
    for number, token in (facts.words.get("added_tokens_decoder") or {}).items():
        content = token.get("content") if isinstance(token, dict) else token
        if tokenizer.token_to_id(content) != int(number):
            raise ConfigError(
                f"tokenizer.path={path}: tokenizer_config.json has {content!r} as id {number}, and tokenizer.json as "
                f"{tokenizer.token_to_id(content)}; save both anew with transformers"
            )


def _json(path: Path, content: bytes) -> dict:
    """Return the content of a tokenizer.json. Raises ConfigError if the file is something else."""
    try:
        spec = json.loads(content)
        spec["model"]["vocab"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"tokenizer.path={path}: not a tokenizer.json"
            + ("; for a tokenizer.model take tokenizer=tiktoken" if path.suffix == ".model" else "")
        ) from error
    return spec
