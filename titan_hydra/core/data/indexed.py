"""Read the index of Megatron-LM's data sets: NAME.idx describes the token ids in NAME.bin. Imports no torch.

Layout, little-endian: 9 bytes MMIDIDX\\0\\0; the version (uint64) 1; a code of the ids' type (uint8); the number of sequences S
and of entries D (uint64 each); S lengths (int32), in tokens; S places in the .bin (int64), in bytes; D numbers of the
sequences at which documents begin (int64), the last of them S. A set with images has S modes (int8) behind these.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np

MAGIC, OLD_MAGIC, VERSION = b"MMIDIDX\0\0", b"TNTIDX\0\0", 1
HEAD = struct.Struct("<9sQBQQ")
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}


def index_of(file: Path) -> Path | None:
    """Return the index beside a .bin; None if there is none, or if a header of ours describes the file."""
    index = file.with_suffix(".idx")
    return index if index.exists() and not Path(f"{file}.json").exists() else None


def indexed_header(index: Path) -> dict[str, Any]:
    """Return the header of the .bin beside an index, in the form of a .bin.json. What Megatron-LM does not record is None.
    Raises ValueError if the index is damaged or of another kind, OSError if it cannot be read.
    """
    dtype, lengths, _ = _parts(index)
    return {
        "dtype": dtype,
        "tokens": int(lengths.sum(dtype=np.int64)),
        "vocab_size": None,
        "bos_id": None,
        "eos_id": None,
        "tokenizer_sha256": None,
    }


def document_starts(index: Path) -> np.ndarray:
    """Return the number of the first token of each document, ascending. Documents without a token are left out."""
    _, lengths, documents = _parts(index)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
    return np.unique(ends[documents])


def _parts(index: Path) -> tuple[str, np.ndarray, np.ndarray]:
    """Return the type of the ids, the lengths of the sequences, and the sequences at which documents begin."""
    size = index.stat().st_size
    with index.open("rb") as stream:
        head = stream.read(HEAD.size)
    if head.startswith(OLD_MAGIC):
        raise ValueError(
            "it is of fairseq's older format (TNTIDX); write it again with Megatron-LM's tools/preprocess_data.py"
        )
    if not head.startswith(MAGIC[: len(head)]) or not head:
        raise ValueError(f"it begins with {head[:9]!r}, not with {MAGIC!r}")
    if len(head) < HEAD.size:
        raise ValueError(f"it has {size} bytes, fewer than the {HEAD.size} of its head: cut off")
    _, version, code, sequences, entries = HEAD.unpack(head)
    if version != VERSION:
        raise ValueError(f"it is of version {version}, and {VERSION} can be read")
    if code not in TYPES:
        raise ValueError(f"its code of the ids' type is {code}, not one of {min(TYPES)} to {max(TYPES)}")
    if np.dtype(TYPES[code]).kind == "f":
        raise ValueError(f"its ids are {TYPES[code]}, and token ids are integers")
    expected = HEAD.size + 12 * sequences + 8 * entries
    if size != expected:
        modes = size == expected + sequences
        raise ValueError(
            "it is of a set with images, which data=tokens cannot read"
            if modes and sequences
            else f"it has {size:,} bytes, and {sequences:,} sequences and {entries:,} entries of documents take {expected:,}"
        )
    content = np.memmap(index, np.uint8, "r")
    lengths = np.frombuffer(content, "<i4", sequences, HEAD.size)
    offsets = np.frombuffer(content, "<i8", sequences, HEAD.size + 4 * sequences)
    documents = np.frombuffer(content, "<i8", entries, HEAD.size + 12 * sequences)
    _check(lengths, offsets, documents, np.dtype(TYPES[code]).itemsize)
    return TYPES[code], lengths, documents


def _check(lengths: np.ndarray, offsets: np.ndarray, documents: np.ndarray, itemsize: int) -> None:
    """Raise ValueError if sequences do not follow one another without gaps, or documents not their order."""
    if (lengths < 0).any():
        raise ValueError(f"sequence {int((lengths < 0).argmax())} has a negative length: damaged")
    wrong = offsets != itemsize * (np.cumsum(lengths, dtype=np.int64) - lengths)
    if wrong.any():
        raise ValueError(f"sequence {int(wrong.argmax())} does not begin where the one before ends")
    if not len(documents) or documents[0] != 0 or documents[-1] != len(lengths) or (np.diff(documents) < 0).any():
        raise ValueError(f"its documents do not go from sequence 0 to {len(lengths)}: damaged")
