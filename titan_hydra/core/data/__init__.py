"""Training data: build() returns a rank's Loader. The order of samples depends on the seed and the step, never on the
layout.

A step takes G = data.global_batch samples in slots 0 to G - 1, and rank r of R data-parallel ranks owns slots [r * G/R,
(r + 1) * G/R). Sources either number their samples (items.py) or give every slot an endless stream (streams.py, fed by
embedded.py or text.py); a mixture (mixture.py) alternates between sources. Unreadable files are handled in shards.py.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from titan_hydra.core.job.config import schema
from titan_hydra.core.job.config.parts import HubSource, TextSource
from titan_hydra.core.job.config.registry import DATA_SOURCES, OBJECTIVES, resolve
from titan_hydra.core.job.config.source import FileSource

if TYPE_CHECKING:
    from .loader import Loader, Samples
    from .shards import BadShards
    from .streams import Documents
    from .tokenizer import Tokenizer

# seed of the order of held-out samples; it is the same for every job, so that held-out losses can be compared
VALIDATION_SEED = 0


def build(job: schema.Job, rank: int, ranks: int, split: str = "train") -> Loader:
    """Build the Loader of data-parallel rank `rank` of `ranks`; split is "train" or "validation".

    Raises ConfigError for missing or damaged files, and for token files with ids that the model's embedding lacks.
    """
    from .loader import Loader

    data = job.data
    global_batch, share = data.global_batch, data.global_batch // ranks
    wanted = wanted_by(job, split, range(rank * share, (rank + 1) * share))
    seed = job.seed if split == "train" else VALIDATION_SEED
    signature = {
        "data.name": data.name,
        "data.global_batch": global_batch,
        "data.seq_len": data.seq_len,
        "data.shuffle": data.shuffle,
        "data.samples": wanted.once,
        "seed": seed,
    }
    if data.shuffle_buffer:
        signature["data.shuffle_buffer"] = data.shuffle_buffer
    samples = samples_of(wanted, seed)
    objective = resolve(OBJECTIVES[job.objective.name].build)(job)
    collate = functools.partial(objective.batch, separators=samples.separators)
    blank = None if wanted.once is None else objective.blank_sample()
    return Loader(
        samples, wanted.slots, global_batch, signature, collate, data.prefetch, wanted.bad, wanted.once, blank
    )


def wanted_by(job: schema.Job, split: str, slots: range) -> Wanted:
    """Return the arguments of a job's sources, for some slots of the global batch."""
    from .shards import BadShards

    return Wanted(job, split, slots, job.data.global_batch, BadShards(job.data.max_bad_shards, job.data.max_bad_rows))


def samples_of(wanted: Wanted, seed: int) -> Samples:
    """Open the job's source, or all sources of its mixture."""
    data = wanted.job.data
    if data.name != "mixture":
        return _samples("data", data, wanted, seed)
    from .mixture import Mixture

    parts = {
        name: _samples(f"data.mixture.{name}", part, wanted, _seed_of(name, seed))
        for name, part in data.mixture.items()
    }
    return Mixture(parts, {name: part.weight for name, part in data.mixture.items()}, wanted.global_batch, seed)


@dataclass(frozen=True)
class Wanted:
    """The arguments that a rank passes to every source."""

    job: schema.Job
    split: str
    slots: range
    global_batch: int
    bad: BadShards

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The job's tokenizer, loaded when a source with text needs it. A rule has already checked that the tokenizer's
        ids fit the model.
        """
        from .tokenizer import load

        return load(self.job.tokenizer)

    @property
    def once(self) -> int | None:
        """The number of samples of which each is read once; None if the samples never end."""
        return self.job.data.samples if self.split == "train" else None

    def order(self, seed: int) -> int | None:
        """Return the seed of the order of samples or documents; None: the order is that of their files."""
        return seed if self.job.data.shuffle else None

    def drawn(self, seed: int) -> int:
        """Return the seed of a source that draws its samples. Validation has another seed, which draws other samples."""
        return seed if self.split == "train" else ~seed


def _samples(key: str, source: schema.Source, wanted: Wanted, seed: int) -> Samples:
    """Return the samples of the source under `key`. A source of documents becomes a stream for each slot: an endless
    series of tokens, cut into samples.
    """
    data, record = wanted.job.data, DATA_SOURCES[source.name]
    built = resolve(record.build)(key, source, wanted, seed)
    if not record.documents:
        return built
    from .streams import Streams

    return Streams(
        built,
        wanted.tokenizer,
        wanted.slots,
        wanted.global_batch,
        data.seq_len,
        wanted.order(seed),
        data.shuffle_buffer,
        wanted.bad,
    )


def open_embedded(key: str, source: schema.Source, wanted: Wanted, seed: int) -> Documents:
    from .embedded import Embedded

    return Embedded(wanted.split)


def open_text_files(key: str, source: TextSource, wanted: Wanted, seed: int) -> Documents:
    from .files import path_of
    from .text import TextFiles

    return TextFiles(*path_of(key, source, wanted.split), source.text_key, wanted.global_batch)


def open_hub(key: str, source: HubSource, wanted: Wanted, seed: int) -> Documents:
    from .text import Hub

    return Hub(key, source, source.split if wanted.split == "train" else source.validation_split, wanted.global_batch)


def open_tokens(key: str, source: FileSource, wanted: Wanted, seed: int) -> Samples:
    """Open files of token ids, whose samples are cut at fixed positions."""
    from .files import path_of
    from .items import TokenFiles

    job = wanted.job
    return TokenFiles(
        *path_of(key, source, wanted.split),
        job.model.vocab_size,
        job.data.seq_len,
        wanted.order(seed),
        wanted.bad,
        job.data.document_mask,
        wanted.once is not None,
    )


def draw_tokens(key: str, source: schema.Source, wanted: Wanted, seed: int) -> Samples:
    from .items import Synthetic

    return Synthetic(wanted.job.model.vocab_size, wanted.job.data.seq_len, wanted.drawn(seed))


def _seed_of(name: str, seed: int) -> int:
    """Return the seed of a source in a mixture. If all sources had the same seed, sources of equal size would have the
    same order, and synthetic sources the same tokens.
    """
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "little")
