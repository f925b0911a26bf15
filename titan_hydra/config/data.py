"""The rules of data: sources and mixtures of them, their files, and the tokenizer that their text goes through."""
from __future__ import annotations

import math
from collections.abc import Iterator

from .fault import Fault
from .files import expand, missing, similar, tokenizer_file, vocabulary_size
from .schema import SOURCES, Data, Job, Source

PERIOD = 10_000  # samples after which a mixture's pattern repeats: weights are rounded to this


def sources(data: Data) -> dict[str, Source]:
    """The sources of a job, by the key they stand under: the parts of a mixture, or the one that data itself is."""
    return {f"data.mixture.{name}": data.mixture[name] for name in sorted(data.mixture)} if data.name == "mixture" else {"data": data}


def shares(weights: list[float]) -> list[int]:
    """How many of PERIOD samples each source gives; what rounding down leaves goes to those it has cut most."""
    exact = [PERIOD * weight / sum(weights) for weight in weights]
    left = PERIOD - sum(map(int, exact))
    cut_most = sorted(range(len(exact)), key=lambda part: int(exact[part]) - exact[part])[:left]
    return [int(share) + (part in cut_most) for part, share in enumerate(exact)]


def mixture_has_weighted_sources(job: Job) -> Iterator[Fault]:
    """A weight is a number above 0, and large enough that its source is met within a period of the pattern."""
    data, parts = job.data, job.data.mixture
    if data.name != "mixture":
        if parts:
            yield Fault("data.name", data.name, f"data.mixture has {', '.join(parts)}, which only data=mixture reads", legal=("mixture",))
        return
    if not parts:
        yield Fault("data.mixture", "{}", "data=mixture needs sources: +data.mixture={NAME: {weight: 1, name: embedded}}")
    for name, part in parts.items():
        if part.name not in SOURCES:
            yield Fault(f"data.mixture.{name}.name", part.name, "not one of the choices", legal=SOURCES)
        if not (part.weight > 0 and math.isfinite(part.weight)):
            yield Fault(f"data.mixture.{name}.weight", part.weight, "must be above 0; leave out a source that is not wanted", legal=(1,))
    if parts and all(part.weight > 0 and math.isfinite(part.weight) for part in parts.values()):
        for name, share in zip(parts, shares([part.weight for part in parts.values()]), strict=True):
            if not share:
                yield Fault(f"data.mixture.{name}.weight", parts[name].weight, f"less than one sample in {PERIOD:,}")


def shuffle_buffer_shuffles(job: Job) -> Iterator[Fault]:
    """It is part of the shuffled order, and of sources whose documents come as a stream."""
    if not job.data.shuffle_buffer:
        return
    if not job.data.shuffle:
        yield Fault("data.shuffle_buffer", job.data.shuffle_buffer, "data.shuffle=false keeps documents in order", legal=(0,))
    if all(source.name in ("tokens", "synthetic") for source in sources(job.data).values()):
        yield Fault("data.shuffle_buffer", job.data.shuffle_buffer, "tokens and synthetic are shuffled as a whole", legal=(0,))


def data_files_are_there(job: Job) -> Iterator[Fault]:
    """A file that is missing now would be missing on every rank, after the queue."""
    for key, source in sources(job.data).items():
        if source.name in ("text_files", "tokens", "hf") and not source.path:
            yield Fault(f"{key}.path", None, f"data={source.name} needs it")
        elif source.name in ("text_files", "tokens"):
            yield from _are_there(f"{key}.path", source.path, job.data.max_bad_shards)
        if source.name in ("text_files", "tokens") and job.validation.name == "on":
            if not source.validation_path:
                yield Fault(f"{key}.validation_path", None, f"validation=on with data={source.name} needs it")
            else:
                yield from _are_there(f"{key}.validation_path", source.validation_path, job.data.max_bad_shards)


def _are_there(key: str, path: str, limit: int) -> Iterator[Fault]:
    found = expand(path)
    if not found:
        yield Fault(key, path, "no such file", legal=similar(path))
    elif len(gone := missing(path, found)) > limit:
        yield Fault(key, path, f"{len(gone)} of a numbered set are missing, the first is {gone[0].name}; a glob can name those that are "
                    f"wanted, data.max_bad_shards={len(gone)} goes on without")


def tokenizer_fits_the_vocabulary(job: Job) -> Iterator[Fault]:
    """An id beyond the embedding's rows would read outside it. A larger embedding is fine: vocabularies are often padded."""
    if all(source.name in ("tokens", "synthetic") for source in sources(job.data).values()):
        return  # no text is encoded; the .bin is checked against its own header when it is opened
    file = tokenizer_file(job.tokenizer)
    if job.tokenizer.name != "embedded" and not job.tokenizer.path:
        yield Fault("tokenizer.path", None, f"tokenizer={job.tokenizer.name} needs it")
        return
    try:
        size = vocabulary_size(job.tokenizer)
    except OSError:
        yield Fault("tokenizer.path", job.tokenizer.path, "no such file", legal=similar(str(file)))
    except (ValueError, KeyError, TypeError) as error:
        yield Fault("tokenizer.path", job.tokenizer.path, f"cannot be read as tokenizer={job.tokenizer.name}: {error}")
    else:
        if size > job.model.vocab_size:
            yield Fault("model.vocab_size", job.model.vocab_size, f"the tokenizer {file.name} has {size} ids", legal=(size,))


VALUES = [mixture_has_weighted_sources, shuffle_buffer_shuffles]
PLACE = [data_files_are_there, tokenizer_fits_the_vocabulary]
