"""The rules of data: sources, mixtures of them, their files, and the tokenizer of their text."""

from collections.abc import Iterator

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.family import family_of
from titan_hydra.core.job.config.fault import Fault, fault_at
from titan_hydra.core.job.config.files import (
    PACKED,
    data_files,
    expand,
    home,
    missing,
    similar,
    tokenizer_file,
    unread,
    vocabulary_size,
)
from titan_hydra.core.job.config.registry import DATA_SOURCES, resolve
from titan_hydra.core.job.config.schema import UNCOUNTED, Job
from titan_hydra.core.job.config.source import data_sources
from titan_hydra.core.job.inputs import PERIOD, shares


def mixture_has_weighted_sources(job: Job) -> Iterator[Fault]:
    """Each weight is large enough for at least one sample in a period of the mixture's pattern."""
    parts = job.data.mixture
    if job.data.name != "mixture":
        return
    if not parts:
        yield Fault(
            "data.mixture", "{}", "data=mixture needs sources: +data.mixture={NAME: {weight: 1, name: embedded}}"
        )
        return
    for name, share in zip(parts, shares([part.weight for part in parts.values()]), strict=True):
        if not share:
            yield Fault(f"data.mixture.{name}.weight", parts[name].weight, f"less than one sample in {PERIOD:,}")


def shuffle_buffer_shuffles(job: Job) -> Iterator[Fault]:
    """The shuffle buffer is used only if shuffling is on, and only by sources whose documents arrive as a stream."""
    if not job.data.shuffle_buffer:
        return
    if not job.data.shuffle:
        yield fault_at(job, "data.shuffle_buffer", "data.shuffle=false keeps documents in order", 0)
    names = sorted({source.name for source in data_sources(job.data).values()})
    if not any(DATA_SOURCES[name].documents for name in names):
        whole = f"data={' and '.join(names)} is shuffled as a whole"
        yield fault_at(job, "data.shuffle_buffer", whole, 0)


def data_files_are_there(job: Job) -> Iterator[Fault]:
    """The data files exist. A file that is missing here would be missing on every rank, after the job has been queued."""
    for key, source in data_sources(job.data).items():
        record = DATA_SOURCES[source.name]
        if record.needs_path and not source.path:
            yield Fault(f"{key}.path", None, f"data={source.name} needs it")
        elif getattr(source, "hub_split", None):
            if job.validation.name == "on" and not getattr(source, "hub_validation_split", None):
                yield Fault(f"{key}.hub_validation_split", None, f"validation=on with data={source.name} needs it")
            continue
        elif record.suffixes and source.path:
            yield from _faults_of_files(f"{key}.path", source.path, record.suffixes, job.data.max_bad_shards)
        if record.suffixes and hasattr(source, "validation_path") and job.validation.name == "on":
            if not source.validation_path:
                yield Fault(f"{key}.validation_path", None, f"validation=on with data={source.name} needs it")
            else:
                yield from _faults_of_files(
                    f"{key}.validation_path", source.validation_path, record.suffixes, job.data.max_bad_shards
                )


def corpus_fills_a_step(job: Job) -> Iterator[Fault]:
    """Warn if the text is shorter than one step. Each step would then contain the whole text several times.

    As a token is at least one byte, there are at most as many tokens as bytes. Compressed files (.gz, .zst, .parquet) hold
    more text than their bytes, and give no warning.
    """
    step = job.data.global_batch * job.data.seq_len
    for key, source in data_sources(job.data).items():
        files = expand(source.path) if source.name == "text_files" else []
        size = sum(file.stat().st_size for file in files)
        if files and size < step and not any(file.suffix in (*PACKED, ".parquet") for file in files):
            yield Fault(f"{key}.path", source.path, f"{size:,} bytes of text, and a step takes {step:,} tokens")


def _faults_of_files(key: str, path: str, suffixes: tuple[str, ...], most_missing: int) -> Iterator[Fault]:
    """Yield the first reason why the files at a path cannot be read: there is none, none has a suffix of the source, all
    are empty, or more than `most_missing` of a numbered set are missing.
    """
    try:
        files = expand(path)
    except (ConfigError, OSError) as error:
        yield Fault(key, path, str(getattr(error, "strerror", error)))
        return
    usable = data_files(path, files, suffixes)
    if not files:
        if home(path).is_dir():
            yield Fault(key, path, "no file in it", ())
        else:
            yield Fault(key, path, "no such file", similar(path))
    elif not usable:
        yield Fault(key, path, unread(files[0], suffixes))
    elif not any(file.stat().st_size for file in usable):
        yield Fault(key, path, "the file is empty" if len(usable) == 1 else "all files are empty")
    elif len(gone := missing(path, files)) > most_missing:
        yield Fault(
            key,
            path,
            f"{len(gone)} of a numbered set are missing, the first is {gone[0].name}; name the others with a glob, or "
            f"set data.max_bad_shards={len(gone)} to go on without them",
        )


def tokenizer_fits_the_vocabulary(job: Job) -> Iterator[Fault]:
    """Every token id has a row in the embedding. The embedding may have more rows: vocabularies are often padded."""
    if not job.validation.tasks and not any(
        DATA_SOURCES[source.name].documents or DATA_SOURCES[source.name].encodes
        for source in data_sources(job.data).values()
    ):
        return  # no text is encoded; the .bin is checked against its own header when it is opened
    file = tokenizer_file(job.tokenizer)
    if job.tokenizer.name != "embedded" and not job.tokenizer.path:
        yield fault_at(job, "tokenizer.path", f"tokenizer={job.tokenizer.name} needs it")
        return
    try:
        size = vocabulary_size(job.tokenizer)
    except OSError:
        yield fault_at(job, "tokenizer.path", "no such file", *similar(str(file)))
    except (ValueError, KeyError, TypeError) as error:
        reason = f"cannot be read as tokenizer={job.tokenizer.name}: {error or type(error).__name__}"
        yield fault_at(job, "tokenizer.path", reason)
    else:
        if size > job.model.vocab_size:
            yield fault_at(job, "model.vocab_size", f"the tokenizer {file.name} has {size} ids", size)


def tasks_can_be_answered(job: Job) -> Iterator[Fault]:
    """The files of tasks exist, their questions fit into a sequence, and the model takes text."""
    takes = family_of(job.model).takes
    if job.validation.tasks and takes != "tokens":
        yield fault_at(job, "validation.tasks", f"model.family={job.model.family} takes {takes}", [])
    elif job.validation.tasks and not any(tokenizer_fits_the_vocabulary(job)):
        yield from resolve("titan_hydra.core.data.tasks:faults")(job)


def sources_find_nothing_wrong(job: Job) -> Iterator[Fault]:
    """Sources pass their own checks. Such a check may, for example, try the first row of a source's files."""
    for key, source in data_sources(job.data).items():
        if record_faults := resolve(DATA_SOURCES[source.name].faults):
            yield from record_faults(key, source, job)


def sources_find_little_wrong(job: Job) -> Iterator[Fault]:
    """Yield the warnings of each source about its own files, such as text that the tokenizer does not know."""
    for key, source in data_sources(job.data).items():
        if record_warnings := resolve(DATA_SOURCES[source.name].warnings):
            yield from record_warnings(key, source, job)


def one_pass_is_counted(job: Job) -> Iterator[Fault]:
    """With steps=epoch, the data has an end, and the launcher has counted the samples up to it."""
    if job.data.samples == UNCOUNTED:
        yield from resolve("titan_hydra.core.data.epoch:faults")(job)


VALUES = [mixture_has_weighted_sources, shuffle_buffer_shuffles]
PLACE = [data_files_are_there, tokenizer_fits_the_vocabulary, tasks_can_be_answered, sources_find_nothing_wrong]
