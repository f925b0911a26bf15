"""Training data: build() gives a rank its Loader. The order of samples is a function of seed and step, never of the layout.

A step takes G = data.global_batch samples in slots 0 to G - 1, and rank r of R data-parallel ranks owns slots [r * G/R, (r + 1) * G/R).
Sources either number their samples (items.py) or give every slot an endless stream (streams.py, fed by embedded.py or text.py).
"""
from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from titan_hydra.config import schema
from titan_hydra.config.status import ConfigError

if TYPE_CHECKING:
    from titan_hydra.train.data.loader import Loader

VALIDATION_SEED = 0  # held-out samples are the same for every seed, so that their losses compare


def build(job: schema.Job, rank: int, ranks: int, split: str = "train", load_tokenizer: Callable | None = None) -> Loader:
    """The Loader of data-parallel rank `rank` of `ranks`; split is "train" or "validation".

    Raises ConfigError for missing or damaged files, and where tokens would have no row in the model's embedding.
    """
    from titan_hydra.train.data.loader import Loader  # torch, which importing this package must not bring in

    data = job.data
    global_batch = data.global_batch or data.local_batch * ranks
    if global_batch % ranks:
        raise ConfigError(f"data.global_batch={global_batch}: not divisible by {ranks} data-parallel ranks; "
                          f"nearest legal: {max(global_batch // ranks, 1) * ranks}")
    share = global_batch // ranks
    slots = range(rank * share, (rank + 1) * share)
    seed = job.seed if split == "train" else VALIDATION_SEED
    signature = {"data.name": data.name, "data.global_batch": global_batch, "data.seq_len": data.seq_len, "data.shuffle": data.shuffle,
                 "seed": seed}
    if data.name in ("tokens", "synthetic"):
        samples = _items(job, split, seed, global_batch)
        separators = samples.bos_id, samples.eos_id
    else:
        from titan_hydra.train import tokenizer as tokenizers
        from titan_hydra.train.data.streams import Streams

        tokenizer = (load_tokenizer or tokenizers.load)(job.tokenizer)
        if tokenizer.vocab_size > job.model.vocab_size:
            raise ConfigError(f"model.vocab_size={job.model.vocab_size}: tokenizer={job.tokenizer.name} has {tokenizer.vocab_size} ids; "
                              f"nearest legal: {tokenizer.vocab_size}")
        source = _source(data, split, global_batch)
        samples = Streams(source, tokenizer, slots, global_batch, data.seq_len, seed, data.shuffle)
        signature["tokenizer"] = tokenizer.sha256
        separators = tokenizer.bos_id, tokenizer.eos_id
    return Loader(samples, slots, signature, separators if data.document_mask else None, data.prefetch)


def _items(job: schema.Job, split: str, seed: int, global_batch: int):
    from titan_hydra.train.data.items import Synthetic, TokenFiles

    data, vocab_size = job.data, job.model.vocab_size
    if data.name == "synthetic":
        return Synthetic(vocab_size, global_batch, data.seq_len, seed if split == "train" else ~seed)
    return TokenFiles(*_path(data, split), vocab_size, global_batch, data.seq_len, seed if data.shuffle else None)


def _source(data: schema.Data, split: str, global_batch: int):
    if data.name == "embedded":
        from titan_hydra.train.data.embedded import Embedded

        return Embedded(split)
    from titan_hydra.train.data.text import Hub, TextFiles

    if data.name == "text_files":
        return TextFiles(*_path(data, split), data.text_key, global_batch)
    return Hub(data, data.split if split == "train" else data.validation_split, global_batch)


def _path(data: schema.Data, split: str) -> tuple[str, str | None]:
    """The key that names the split's files, and its value."""
    return ("data.path", data.path) if split == "train" else ("data.validation_path", data.validation_path)
