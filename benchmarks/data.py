"""Measure how fast one process makes batches: python benchmarks/data.py [--seconds 3] [--seq-len 2048] [--global-batch
16]; and how much memory large files cost: --large 1000 (megabytes)

Text is tokenized during the measurement, .bin files were encoded before. No step uses the batches, and prefetch is off,
so the numbers are the most that one core can deliver; with prefetch this work runs while steps run.
"""

import argparse
import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet

from titan_hydra import cli
from titan_hydra.core import data
from titan_hydra.core.data.embedded import Embedded
from titan_hydra.core.data.tokenizer import load
from titan_hydra.core.job.config import from_dict, schema
from titan_hydra.core.job.config.registry import DATA_SOURCES
from titan_hydra.experiments.runs.command_data import _train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--large", type=int, default=0, help="megabytes of a .txt, and of a Parquet row group")
    args = parser.parse_args()
    if args.large:
        print_memory(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        text, tokens = write_corpus(Path(folder))
        measure(make_job(args, name="synthetic"), 0)  # imports torch
        print(f"\n{'source':<13} {'first batch, s':>14} {'tokens/s':>12}")
        sources = {
            "embedded": {},
            "text_files": {"path": text},
            "tokens": {"path": tokens},
            "synthetic": {},
            "embedded_chat": {},
        }
        for name, keys in sources.items():
            if name in DATA_SOURCES:  # embedded_chat belongs to a recipe
                first, speed = measure(make_job(args, name=name, **keys), args.seconds)
                print(f"{name:<13} {first:>14.3f} {speed:>12,.0f}")


def write_corpus(folder: Path) -> tuple[str, str]:
    """Write the embedded corpus as text files, and as the .bin file that `titan data encode` makes of them."""
    corpus = Embedded()
    for unit in range(corpus.units):
        for _, text in corpus.rows(unit):
            (folder / f"{unit:05}.txt").write_text(text)
    cli.main(
        [
            "data",
            "encode",
            "--tokenizer",
            "embedded",
            "--workers",
            "1",
            "--out",
            f"{folder}/corpus.bin",
            f"{folder}/*.txt",
        ]
    )
    return f"{folder}/*.txt", f"{folder}/corpus.bin"


def print_memory(args: argparse.Namespace) -> None:
    """Print, for each kind of large file and both kinds of tokenizer, the first batch's seconds and the peak memory of a
    process with its whole global batch in it.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        trained = _train(Embedded().pieces, 4000)
        trained.add_special_tokens(["</s>"])
        trained.save(str(file))
        print(f"{'source':<9} {'tokenizer':<9} {'first batch, s':>14} {'MiB':>6}")
        for path in (large_text(Path(folder), args.large), large_parquet(Path(folder), args.large)):
            for name in ("embedded", "hf"):
                own = schema.Tokenizer(name, str(file) if name == "hf" else None)
                with multiprocessing.get_context("spawn").Pool(1) as pool:  # a peak can only be measured once
                    first, peak = pool.apply(measure_memory, (args, str(path), own))
                print(f"{path.suffix:<9} {name:<9} {first:>14.2f} {peak:>6,.0f}", flush=True)


def measure_memory(args: argparse.Namespace, path: str, own: schema.Tokenizer) -> tuple[float, float]:
    """Return the seconds until the first batch, and by how many MiB ten batches raise the process's peak memory."""
    measure(make_job(args, name="embedded"), 0)  # imports torch
    job = make_job(args, name="text_files", path=path)
    job.tokenizer = own
    load(own).document("a")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what the process has now
    before = peak_memory()
    start = time.perf_counter()
    loader = data.build(job, rank=0, ranks=1)
    loader.next()
    first = time.perf_counter() - start
    for _ in range(9):
        loader.next()
    return first, peak_memory() - before


def peak_memory() -> float:
    """Return the largest memory of this process in MiB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def large_text(folder: Path, megabytes: int) -> Path:
    """Write one .txt of the embedded corpus again and again, in other orders."""
    with (folder / "large.txt").open("w") as stream:
        for text in texts_of(megabytes):
            stream.write(text)
    return folder / "large.txt"


def large_parquet(folder: Path, megabytes: int) -> Path:
    """Write one .parquet with a single row group, as pandas does."""
    table = pyarrow.table({"text": pyarrow.array(texts_of(megabytes), pyarrow.large_string())})
    pyarrow.parquet.write_table(table, folder / "large.parquet", row_group_size=len(table))
    return folder / "large.parquet"


def texts_of(megabytes: int) -> Iterator[str]:
    pieces, size, number = Embedded().pieces, 0, 0
    while size < megabytes << 20:
        text = f"{number} {pieces[number * 7919 % len(pieces)]}"
        size, number = size + len(text), number + 1
        yield text


def make_job(args: argparse.Namespace, **keys) -> schema.Job:
    job = schema.Job()
    job.model.vocab_size = 4096
    job.objective.name = "sft" if keys["name"] == "embedded_chat" else "language"
    job.data = from_dict(
        schema.Data, {"seq_len": args.seq_len, "global_batch": args.global_batch, "prefetch": 0, **keys}
    )
    return job


def measure(job: schema.Job, seconds: float) -> tuple[float, float]:
    """Return the seconds until the first batch, and the tokens per second after it."""
    start = time.perf_counter()
    loader = data.build(job, rank=0, ranks=1)
    loader.next()
    first = time.perf_counter()
    steps = 0
    while time.perf_counter() < first + seconds:
        loader.next()
        steps += 1
    return first - start, steps * job.data.global_batch * job.data.seq_len / (time.perf_counter() - first)


if __name__ == "__main__":
    main()
