"""Which tokenizer's ids a job's data hold: that of the job, unless files of ids name another in their headers. Imports no
torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import schema, to_dict
from titan_hydra.core.job.config.fault import Fault
from titan_hydra.core.job.config.files import expand
from titan_hydra.core.job.config.registry import DATA_SOURCES
from titan_hydra.core.job.config.source import FileSource

from .facts import is_digest
from .items import header_at, wrong_size
from .tokenizer import Tokenizer, load

MOST = 256  # maximum number of headers that are read before the start
FIRST = 1 << 20  # number of tokens in which a warning looks for begin-of-text
SAMPLE = "The value 3.14 isn't 42;\tnaïve λ → 日本語 🏳️\r\n    return [x for x in range(10)]  # ok\n\n" * 2


def sources_of(section: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the sources in a data section: the parts of a mixture, or the section itself."""
    return [*section["mixture"].values()] if section.get("name") == "mixture" else [section]


def header_of(data: dict[str, Any], located: Callable[[str], str] = str) -> dict[str, Any] | None:
    """Return the header of the first file of ids among the sources of a data section; None if text is encoded."""
    for source in sources_of(data):
        kind = DATA_SOURCES.get(source.get("name"))
        if kind and kind.encoded and source.get("path") and (header := first_header(located(source["path"]))):
            return header
    return None


def first_header(path: str) -> dict[str, Any] | None:
    """Return the header of the first file of ids at a path; None if there is none, or if it is damaged."""
    try:
        files = [file for file in expand(path) if file.suffix == ".bin"]
    except (ConfigError, OSError):
        return None
    for file in files[:1]:
        with contextlib.suppress(ConfigError):  # the source itself says what is wrong
            return header_at(file)
    return None


def learned_tokenizer(header: dict[str, Any] | None, keys: schema.Tokenizer) -> Tokenizer:
    """Load the tokenizer of a job whose files of ids have this header; None: there are none. Raises ConfigError if the
    files were encoded by another tokenizer, or if nobody says by which.
    """
    tokenizer = load(keys)
    if header is None:
        return tokenizer
    digest = header["tokenizer_sha256"]
    if digest != tokenizer.sha256 if is_digest(digest) else keys.name == "embedded":
        which = f"of SHA-256 {digest}" if is_digest(digest) else "of which their header has no SHA-256"
        raise ConfigError(
            f"tokenizer={keys.name}: the data were encoded by another tokenizer, {which}; name the file of that one with "
            "tokenizer=hf tokenizer.path=FILE"
        )
    return separated(tokenizer, header)


def separated(tokenizer: Tokenizer, header: dict[str, Any]) -> Tokenizer:
    """Return a tokenizer with the begin-of-text and end-of-text of a header."""
    eos = tokenizer.eos_id if header["eos_id"] is None else header["eos_id"]
    return replace(tokenizer, bos_id=None if header["bos_id"] == eos else header["bos_id"], eos_id=eos)


def tokenizer_of_data(job: schema.Job) -> Tokenizer:
    """Load the tokenizer of a job's data. Raises ConfigError as `learned_tokenizer` does."""
    return learned_tokenizer(header_of(to_dict(job)["data"]), job.tokenizer)


def same_ids(first: Tokenizer, second: Tokenizer) -> bool:
    """Whether two tokenizers, perhaps of different files, encode a sample alike and agree on their special tokens."""
    common = first.special.keys() & second.special.keys()
    return first.encode(SAMPLE) == second.encode(SAMPLE) and all(
        first.special[name] == second.special[name] for name in common
    )


def faults_of_ids(key: str, source: FileSource, job: schema.Job) -> Iterator[Fault]:
    """Yield a fault if headers are not those of token ids, or if training and held-out files had different tokenizers."""
    held_out = source.validation_path if job.validation.name == "on" else None
    digests: dict[str, str] = {}
    for part, path in (("path", source.path), ("validation_path", held_out)):
        bad: list[str] = []
        try:
            files = [file for file in expand(path or "") if file.suffix == ".bin"][:MOST]
        except (ConfigError, OSError):
            return  # another rule says so
        for file in files:
            try:
                header = header_at(file)
                digests.setdefault(part, header["tokenizer_sha256"])
                bad += filter(None, [wrong_size(file, header)])
            except ConfigError as error:
                bad.append(str(error))
        if len(bad) > job.data.max_bad_shards:
            yield Fault(f"{key}.{part}", path, bad[0])
    if wrong := _wrong_beginning(source.path or "", job):
        yield Fault(f"{key}.path", source.path, wrong)
    if len(set(digests.values())) > 1:
        yield Fault(
            f"{key}.validation_path",
            held_out,
            f"encoded by the tokenizer of SHA-256 {digests['validation_path']}, and {key}.path by that of {digests['path']}",
        )


def _wrong_beginning(path: str, job: schema.Job) -> str | None:
    """Return why a job cannot train on the ids with which the first file begins; None if it can."""
    header = first_header(path)
    if header is None or job.data.max_bad_shards:
        return None
    file = next(file for file in expand(path) if file.suffix == ".bin")
    with contextlib.suppress(OSError, ValueError):
        ids = np.fromfile(file, header["dtype"], count=FIRST)
        if len(ids) and (wrong := [token for token in (ids.min(), ids.max()) if not 0 <= token < job.model.vocab_size]):
            return f"{file}: its first {len(ids):,} tokens have the id {wrong[0]}, and model.vocab_size is {job.model.vocab_size}"
        if job.data.document_mask and len(ids) and (ids == header["eos_id"]).all():
            return (
                f"{file}: its first {len(ids):,} tokens are all eos_id={header['eos_id']}, so none of them is learned"
            )
    return None


def warnings_of_ids(key: str, source: FileSource, job: schema.Job) -> Iterator[Fault]:
    """Yield a warning if documents begin at a begin-of-text that does not occur where the first file begins."""
    header = first_header(source.path or "") if job.data.document_mask else None
    if header is None or header["bos_id"] in (None, header["eos_id"]):
        return
    with contextlib.suppress(OSError, ValueError):
        file = next(file for file in expand(source.path or "") if file.suffix == ".bin")
        ids = np.fromfile(file, header["dtype"], count=FIRST)
        if header["bos_id"] not in ids and header["eos_id"] in ids:
            reason = f"its first {len(ids):,} tokens have no bos_id={header['bos_id']}, so no document begins in them"
            yield Fault(f"{key}.path", source.path, reason, legal=("bos_id null in the header",))
