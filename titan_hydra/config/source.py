"""The keys of data: of one source, and of what a job does with its samples."""

from __future__ import annotations

from dataclasses import dataclass

from .field import key
from .ranges import COUNT, NATURAL, PATH, SHARE, Interval
from .registry import DATA_SOURCES, Names


@dataclass
class Source:
    name: str = key(..., "source of the tokens", choices=Names(DATA_SOURCES))
    path: str | None = key(
        None, "files (globs allowed) of text_files, tokens and chat; dataset name of hf", PATH, only=Names(DATA_SOURCES, "path")
    )
    subset: str | None = key(None, "hf: configuration of the dataset, for example `en`", only=Names(DATA_SOURCES, "subset"))
    split: str = key("train", "hf: split of the dataset", only=Names(DATA_SOURCES, "split"))
    text_key: str = key("text", "name of the column that holds the text", only=Names(DATA_SOURCES, "text_key"))
    validation_path: str | None = key(
        None,
        "files held out for validation (text_files, tokens, chat)",
        PATH,
        only=Names(DATA_SOURCES, "validation_path"),
        identity=False,
        changes="held-out loss",
    )
    validation_split: str = key(
        "validation", "hf: split used for validation", only=Names(DATA_SOURCES, "validation_split"), identity=False, changes="held-out loss"
    )
    chat_template: str | None = key(
        None,
        "chat: how a conversation becomes text: a Jinja file, or one of the package's, chatml, gemma, "
        "llama3, mistral, phi or qwen3; null: the tokenizer's own",
        PATH,
        only=Names(DATA_SOURCES, "chat_template"),
        late=True,
    )
    train_on: str = key(
        "assistant",
        "chat: the tokens that are learned: what the assistant says, its last message alone, or all",
        choices=("assistant", "last", "all"),
        only=Names(DATA_SOURCES, "train_on"),
        late=True,
    )
    encoders: str | None = key(
        None,
        "image_files: folder with text_encoder, text_encoder_2, vae and two tokenizers, as Hugging Face has them for FLUX",
        PATH,
        only=Names(DATA_SOURCES, "encoders"),
        late=True,
    )
    caption_dropout: float = key(
        0.447,
        "images: share of the captions that are replaced by the empty one, drawn for each text encoder "
        "apart, so that samples can be guided",
        SHARE,
        only=Names(DATA_SOURCES, "caption_dropout"),
        late=True,
    )


@dataclass
class Part(Source):
    weight: float = key(
        ..., "this source's part of the samples, in proportion to the weights of the others", Interval(0, 1_000_000, open_low=True)
    )


@dataclass
class Data(Source):
    name: str = key(..., "source of the tokens", choices=Names(DATA_SOURCES, more=("mixture",)))
    seq_len: int = key(2048, "tokens of a sample", Interval(2, 2**31 - 1), changes="learning and work")
    local_batch: int = key(
        8, "samples a data-parallel rank takes at a time; gradient accumulation makes up the rest", COUNT, changes="technique"
    )
    global_batch: int | None = key(None, "samples of an optimizer step over all ranks; null: local_batch on every rank once", COUNT)
    document_mask: bool = key(False, "attention does not cross documents, and positions restart with each", changes="learning and work")
    shuffle: bool = key(True, "visit documents or samples in an order drawn from the seed")
    prefetch: int = key(4, "batches prepared ahead of the step that takes them", Interval(1, 10_000), identity=False)
    mixture: dict[str, Part] = key(
        dict,
        "data=mixture: the sources by name, each with a weight and the keys above: "
        "+data.mixture={web: {weight: 0.7, name: c4}, own: {weight: 0.3, name: tokens, path: own.bin}}",
        only=("mixture",),
        late=True,
    )
    shuffle_buffer: int = key(0, "documents of a stream that are shuffled together; 0: those of a shard stay in order", NATURAL, late=True)
    patches: int = key(
        1024,
        "image patches that a sample has room for; tensors have this size, however many there are",
        COUNT,
        only=Names(DATA_SOURCES, "patches"),
        late=True,
        changes="learning and work",
    )
    image_patches: int = key(
        256,
        "an image with more patches is scaled down to this number; its aspect ratio stays",
        COUNT,
        only=Names(DATA_SOURCES, "patches"),
        late=True,
        changes="learning and work",
    )
    max_bad_shards: int = key(
        0, "missing or damaged files or shards (of chat: rows) that may be left out, each with a warning", NATURAL, identity=False
    )
