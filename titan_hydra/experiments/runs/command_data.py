"""`titan data`: train a tokenizer on text, or encode text into a .bin file, which data=tokens maps into memory."""

import argparse
import base64
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.data import files
from titan_hydra.core.data import tokenizer as tokenizers_of_jobs
from titan_hydra.core.data.embedded import Embedded
from titan_hydra.core.data.long_text import LongText, Piece, is_long
from titan_hydra.core.data.shards import BadRow, BadShards
from titan_hydra.core.data.unknown import share_of_unknown
from titan_hydra.core.job.config import schema
from titan_hydra.core.job.config.files import write_text

from .bad_rows import RowsLeftOut, add_max_bad_rows

BATCH_CHARACTERS = 1 << 20  # number of characters of text in a worker's batch
WORKER: dict[str, Any] = {}  # the tokenizer and the dtype of this worker process


def train_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--vocab", type=int, required=True, help="vocabulary size, including Llama 3's 256 special tokens"
    )
    parser.add_argument("--out", type=Path, required=True, help="the tokenizer.model to write")
    _add_files(parser, "*", "; without files: the embedded corpus")


def encode_text_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        default="embedded",
        help="path of a tokenizer.model or tokenizer.json (default: embedded, the package's own tokenizer)",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help=".bin file to write; a second file, OUT.json, describes it"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="number of encoding processes (default: %(default)s)"
    )
    _add_files(parser, "+")


def _add_files(parser: argparse.ArgumentParser, count: str, without: str = "") -> None:
    parser.add_argument(
        "files",
        nargs=count,
        help=f"{' '.join(files.TEXT_SUFFIXES)} files, also with .gz or .zst; globs and folders are allowed{without}",
    )
    parser.add_argument(
        "--text-key", default="text", help="column that holds the text in .jsonl and .parquet (default: text)"
    )
    add_max_bad_rows(parser)


@contextmanager
def repairable(args: argparse.Namespace) -> Iterator[None]:
    """Raise a ConfigError for errors that the user can repair, such as a full disk or a killed worker."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"--out={args.out}: {error.strerror or error}") from error
    except BrokenProcessPool as error:
        raise ConfigError(
            f"--workers={args.workers}: a worker was killed, perhaps because memory ran out; use fewer"
        ) from error


def train_tokenizer(args: argparse.Namespace) -> int:
    """Train byte-pair merges with the library `tokenizers`, write them for tiktoken, and check that both libraries
    encode in the same way.
    """
    with repairable(args):
        return _trained(args)


def _trained(args: argparse.Namespace) -> int:
    """Train a tokenizer on the texts, write it as a tokenizer.model, and check that tiktoken encodes a sample alike."""
    merges = args.vocab - 256 - len(tokenizers_of_jobs.LLAMA3_SPECIALS)
    if merges < 0:
        raise ConfigError(
            f"--vocab={args.vocab}: 256 bytes and {len(tokenizers_of_jobs.LLAMA3_SPECIALS)} special tokens need 512"
        )
    bad = RowsLeftOut(args.max_bad_rows)
    trained = _train((piece.text for piece in _texts(args, bad)), 256 + merges)
    bytes_of = _bytes_of_ids(trained)
    tokens = [bytes([byte]) for byte in range(256)] + [token for _, token in sorted(bytes_of.items()) if len(token) > 1]
    if len(tokens) < 256 + merges:
        raise ConfigError(f"--vocab={args.vocab}: the text is too short for it; it yields {len(tokens) + 256}")
    model = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    write_text(args.out, model)
    ours = tokenizers_of_jobs.load(schema.Tokenizer(name="tiktoken", path=str(args.out)))
    sample = [piece.text for piece in islice(_texts(args, bad), 1000)]
    for text in sample:
        if [bytes_of[id] for id in trained.encode(text).ids] != [tokens[id] for id in ours.encode(text)]:
            raise RuntimeError(f"tiktoken does not encode as the trained tokenizer does: {text[:80]!r}")
    print(
        f"{args.out}: {len(tokens)} ranks + {len(tokenizers_of_jobs.LLAMA3_SPECIALS)} special tokens = {args.vocab}; "
        f"tiktoken and tokenizers agree on {len(sample)} documents{bad}"
    )
    return Exit.DONE


def encode_text(args: argparse.Namespace) -> int:
    """Write the documents' tokens into the .bin file, in the order of the input files, and write its header file."""
    with repairable(args):
        return _encoded(args)


def _encoded(args: argparse.Namespace) -> int:
    """Encode the texts into a .bin file and its header. The file has another name until it is complete."""
    if args.workers < 1:
        raise ConfigError(f"--workers={args.workers}: at least 1")
    config = _tokenizer_config(args.tokenizer)
    tokenizer = tokenizers_of_jobs.load(config)
    dtype = "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"
    header, partial = Path(f"{args.out}.json"), Path(f"{args.out}.partial")
    documents = tokens = unknown = 0
    bad = RowsLeftOut(args.max_bad_rows)
    texts = _texts(args, bad)
    try:
        with open(partial, "wb") as stream, _progress() as progress:
            row = progress.add_task("encoding", documents=0, tokens=0)
            for encoded, count in _encode_in_order(config, texts, dtype, args.workers):
                stream.write(encoded)
                ids = np.frombuffer(encoded, dtype)
                documents, tokens, unknown = (
                    documents + count,
                    tokens + len(ids),
                    unknown + int((ids == tokenizer.unknown).sum()),
                )
                progress.update(row, documents=documents, tokens=tokens)
        if not tokens:
            raise ConfigError(f"{' '.join(args.files)}: no text")
        header.unlink(missing_ok=True)  # an old header is deleted first, as it must not describe the new tokens
        partial.replace(args.out)
    finally:
        partial.unlink(missing_ok=True)
    write_text(
        header,
        json.dumps(
            {
                "dtype": dtype,
                "tokens": tokens,
                "documents": documents,
                "vocab_size": tokenizer.vocab_size,
                "bos_id": tokenizer.bos_id,
                "eos_id": tokenizer.eos_id,
                "tokenizer_sha256": tokenizer.sha256,
            },
            indent=2,
        )
        + "\n",
    )
    print(f"{args.out}: {documents} documents, {tokens} tokens{share_of_unknown(unknown, tokens)}, {dtype}{bad}")
    return Exit.DONE


def _texts(args: argparse.Namespace, bad: BadShards) -> Iterator[Piece]:
    """Return the documents of the files, long ones in pieces. All paths are checked before the first document is read."""
    if not args.files:
        corpus = Embedded()
        return (Piece(text) for unit in range(corpus.units) for _, text in corpus.rows(unit))
    paths = [file for path in args.files for file in files.require("FILES", path, files.TEXT_SUFFIXES)]
    return (piece for path in paths for piece in _pieces(path, args.text_key, bad))


def _pieces(file: Path, text_key: str, bad: BadShards) -> Iterator[Piece]:
    """Yield the texts of a file; a long text in pieces."""
    if is_long(file):
        yield from (piece for _, piece in LongText(file).pieces())
        return
    for _, text in files.rows(file, text_key):
        if not isinstance(text, BadRow):
            yield from [Piece(text)] if text else ()
        else:
            bad.add(text)


def _train(texts: Iterable[str], size: int) -> Any:
    """Train byte-level BPE with `size` tokens, which splits text as Llama 3 does."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(tokenizers.Regex(tokenizers_of_jobs.LLAMA3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=sys.stderr.isatty()
        ),
    )
    return tokenizer


def _bytes_of_ids(trained: Any) -> dict[int, bytes]:
    """Return the bytes of each id of the trained tokenizer. Ids are in the order in which merges were learnt."""
    from titan_hydra.core.checkpoint.tokenizer import letters_of_bytes

    letters = letters_of_bytes()
    return {id: bytes(letters.index(letter) for letter in token) for token, id in trained.get_vocab().items()}


def _tokenizer_config(name: str) -> schema.Tokenizer:
    if name == "embedded":
        return schema.Tokenizer(name="embedded")
    return schema.Tokenizer(name="hf" if name.endswith(".json") else "tiktoken", path=name)


def _encode_in_order(
    config: schema.Tokenizer, texts: Iterator[Piece], dtype: str, workers: int
) -> Iterator[tuple[bytes, int]]:
    """Yield for each batch its encoded tokens and its number of documents, in the order of `texts`. At most 2 * workers
    batches are encoded ahead of the writer.
    """
    if workers == 1:
        _start_worker(config, dtype)
        yield from map(_encode_batch, _batches(texts))
        return
    # workers are not forked, as a forked process would lack the tokenizer's threads
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, _start_worker, (config, dtype))
    waiting: deque[Any] = deque()
    try:
        for batch in _batches(texts):
            waiting.append(pool.submit(_encode_batch, batch))
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(config: schema.Tokenizer, dtype: str) -> None:
    """Load the tokenizer in a worker process. The worker ignores Ctrl-C, which the writing process handles, and it ends
    when the writing process ends.
    """
    if parent := multiprocessing.parent_process():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    WORKER.update(tokenizer=tokenizers_of_jobs.load(config), dtype=dtype)


def _end_with(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _encode_batch(pieces: list[Piece]) -> tuple[bytes, int]:
    """Return the tokens of some documents or parts of one, and the number of documents that end in them."""
    ids = [token for piece in pieces for token in piece.encode(WORKER["tokenizer"])]
    return np.array(ids, dtype=WORKER["dtype"]).tobytes(), sum(piece.last for piece in pieces)


def _batches(texts: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Group texts into batches of about BATCH_CHARACTERS characters, one for each call of a worker."""
    batch, size = [], 0
    for piece in texts:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _progress() -> Any:
    """Return a progress bar on stderr that counts documents and tokens."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (
        SpinnerColumn(),
        TextColumn("{task.fields[documents]:,} documents, {task.fields[tokens]:,} tokens"),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
