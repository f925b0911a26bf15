"""The data sources of a job and their shares in a mixture; the files that a job reads, and their digests. Imports nothing heavy.

Each key that names files states by `reads` (core/job/config/field.py) what they are: data, validation, tasks, tokenizer, weights
or a schedule. So the keys of a user's own parts are found too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.files import data_files, expand, home
from titan_hydra.core.job.config.registry import DATA_SOURCES
from titan_hydra.core.job.config.schema import Job

DATA_FILES = "data.files"  # key of the digest of the files of data, in the saved order of the data
# number of samples after which a mixture's pattern repeats; weights are rounded to whole samples of the pattern
PERIOD = 10_000
MANY = 100  # of more files than this, at most 1 MiB a file is read
WHOLE, LITTLE = 64 << 20, 1 << 20  # bytes up to which a file is read as a whole, if there are few files or many
# names of the files of a model's folder that hold weights, say what the model computes, or where its data goes on
WEIGHTS = ("*.safetensors", "*.distcp", "config.json", "*.index.json", "rank_*.json", "manifest.json")
# names of files beside a tokenizer.json from which special tokens and the chat template are read (core/data/facts.py)
AND_BESIDE = " and beside"  # end of the name under which these are recorded
BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "config.json", "generation_config.json"),
    *("chat_template.jinja", "chat_template.json"),
)
PIECES = 10  # number of pieces that are read of a larger file, the first and the last one included
SETTLED = 2.0  # seconds after which a file's modification time shows that the file has not been written since
PATIENCE = 2.0  # seconds after which the progress is printed
FRESH = 30.0  # seconds for which a look at many files counts for the other cells of a command line

# (path, bytes that are read as a whole, size, modification time, inode) -> digest of a file
_known: dict[tuple[str, int, int, int, int], str] = {}
# (absolute path, suffixes and names) -> when it was looked at, and what was found: a sweep asks for each of its cells
_looked: dict[tuple[str, tuple[str, ...]], tuple[float, Found]] = {}


@dataclass(frozen=True)
class Input:
    """A path that a key names: what the files are, the path as typed, the suffixes of the files that are read, and the
    name under which they are recorded. With `names`, only files that lie in the folder itself and have one of these names
    count. Files with a name of `beside` count if they lie beside the file, and headers if they lie beside a .bin.
    """

    key: str
    word: str
    path: str
    suffixes: tuple[str, ...] = ()
    name: str = ""
    names: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()

    def files(self) -> list[Path]:
        """Return the files that count. Raises ConfigError for a path that the sources refuse."""
        path = home(self.path)
        if self.names and path.is_dir():
            return sorted(file for name in self.names for file in path.glob(name) if file.is_file())
        files = data_files(self.path, expand(self.path), self.suffixes)
        beside = [path.with_name(name) for name in self.beside] if files else []
        # what says how the numbers of a .bin are read: our header, and Megatron-LM's index
        tokens = [file for file in files if file.suffix == ".bin"]
        beside += [
            companion
            for file in tokens
            for companion in (file.with_name(f"{file.name}.json"), file.with_suffix(".idx"))
        ]
        return files + [file for file in beside if file.is_file() and file != path]


@dataclass
class Found:
    """The files that an input names now. `digest` covers the names below their common folder, and the contents; it is the
    same for the same files in another folder. Of files larger than `whole` bytes only pieces are read.
    """

    path: str  # absolute
    entries: dict[str, list[Any]] = field(default_factory=dict)  # by name: size, modification time, inode, digest

    @property
    def bytes(self) -> int:
        return sum(entry[0] for entry in self.entries.values())

    @property
    def whole(self) -> int:
        return most_read(len(self.entries))

    @property
    def sampled(self) -> bool:
        """Whether a part of the files was not read."""
        return any(entry[0] > self.whole for entry in self.entries.values())

    @property
    def digest(self) -> str:
        total = hashlib.sha256()
        for name, (size, _, _, digest) in sorted(self.entries.items()):
            # the name of a single file does not matter
            total.update(os.fsencode(f"{name if len(self.entries) > 1 else ''}\0{size}\0{digest}\0"))
        return total.hexdigest()[:16]


def most_read(count: int) -> int:
    """Return the size up to which each file of a set of `count` files is read as a whole."""
    return LITTLE if count > MANY else WHOLE


def inputs_of(job: Job) -> list[Input]:
    """Return the inputs of a job that are set and used, in the order of the schema."""
    found = list(_inputs("", job))
    return [one for one in found if job.validation.name == "on" or one.word not in ("validation", "tasks")]


def _inputs(prefix: str, section: Any) -> Iterator[Input]:
    """Yield the inputs in a section: its keys that name files (their metadata has `reads`), and those of the sections
    in it.
    """
    for spec in dataclasses.fields(section):
        key, value = prefix + spec.name, getattr(section, spec.name)
        if word := spec.metadata.get("reads"):
            suffixes = DATA_SOURCES[section.name].suffixes if getattr(section, "name", None) in DATA_SOURCES else ()
            of_source = suffixes if spec.name in ("path", "validation_path") else ()
            names, several = WEIGHTS if word == "weights" else (), isinstance(value, list)
            for path in value if several else [value] if value else []:
                yield Input(
                    key=key,
                    word=word,
                    path=path,
                    suffixes=of_source,
                    name=f"{key}[{path}]" if several else key,
                    names=names,
                )
                if word == "tokenizer" and path.endswith(".json"):
                    yield Input(key, word, path, name=f"{key}{AND_BESIDE}", beside=BESIDE)
        elif dataclasses.is_dataclass(value):
            yield from _inputs(f"{key}.", value)
        elif isinstance(value, dict):
            for name, inner in value.items():
                if dataclasses.is_dataclass(inner):
                    yield from _inputs(f"{key}.{name}.", inner)


def look_at(one: Input, tables: Sequence[dict[str, list[Any]]] = ()) -> Found | None:
    """Read the files that an input names, and return what was found; None if the path names no files of this machine,
    such as the name of a data set of the hub. `tables` are the entries of earlier looks, the newest first: the digest of
    a file whose size, modification time and inode are still the same is not computed again. A table of few files does
    not count for many, nor the other way round, as its digests are of more bytes.
    """
    place = (str(home(one.path).absolute()), (*one.suffixes, *one.names, *one.beside))
    if place in _looked and time.monotonic() - _looked[place][0] < FRESH:
        return _looked[place][1]
    try:
        files = one.files()
    except ConfigError:
        return None  # a rule of the source refuses the path
    if not files:
        return None
    found, folder = Found(place[0]), os.path.commonpath([file.parent.absolute() for file in files])
    whole = most_read(len(files))
    usable = [table for table in tables if most_read(len(table)) == whole]
    known = {name: entry for table in reversed(usable) for name, entry in table.items()}
    began, told = time.monotonic(), 0.0
    for number, file in enumerate(files):
        name = os.path.relpath(file, folder)
        found.entries[name] = _entry(file, whole, known.get(name))
        if (now := time.monotonic()) - max(began, told) > PATIENCE:
            told = now
            print(f"{one.key}: reading {number + 1:,} of {len(files):,} files", file=sys.stderr, flush=True)
    if len(files) > MANY:
        _looked[place] = (time.monotonic(), found)
    return found


def _entry(file: Path, whole: int, known: list[Any] | None) -> list[Any]:
    """Return size, modification time (ns), inode and digest of a file. The time is 0 if the file was written just now: a
    further change might leave the time as it is.
    """
    facts = file.stat()
    place = (str(file.absolute()), whole, facts.st_size, facts.st_mtime_ns, facts.st_ino)
    if known and known[:3] == [facts.st_size, facts.st_mtime_ns, facts.st_ino]:
        return known
    settled = time.time() - facts.st_mtime > SETTLED
    digest = (_known.get(place) if settled else None) or digest_of_file(file, facts.st_size, whole)
    if settled:
        _known[place] = digest
    return [facts.st_size, facts.st_mtime_ns if settled else 0, facts.st_ino, digest]


def digest_of_file(file: Path, size: int, whole: int = WHOLE) -> str:
    """Return 32 hex digits of the sha256 over a file; over PIECES pieces of a file that is larger than `whole` bytes."""
    total = hashlib.sha256()
    with file.open("rb") as stream:
        if size <= whole:
            while block := stream.read(1 << 20):
                total.update(block)
        else:
            length = min(whole // PIECES, 1 << 20)
            for piece in range(PIECES):
                stream.seek((size - length) * piece // (PIECES - 1))
                total.update(stream.read(length))
    return total.hexdigest()[:32]


def look_anew() -> None:
    """Forget what was found, at the start of a command line. Digests are kept, as they belong to times and inodes."""
    _looked.clear()


def digest_of_files(path: str, suffixes: tuple[str, ...]) -> str | None:
    """Return the digest of the files of data that a path names; None if there are none."""
    file_set = look_at(Input("data.path", "data", path, suffixes))
    return file_set.digest if file_set else None


def shares(weights: list[float]) -> list[int]:
    """Return how many of PERIOD samples each source gives. Weights are rounded down; the remaining samples go to the
    sources that lost most by rounding.
    """
    exact = [PERIOD * weight / sum(weights) for weight in weights]
    left = PERIOD - sum(map(int, exact))
    cut_most = sorted(range(len(exact)), key=lambda part: int(exact[part]) - exact[part])[:left]
    return [int(share) + (part in cut_most) for part, share in enumerate(exact)]
