"""Measure how fast one process makes batches: python benchmarks/data.py [--seconds 3] [--seq-len 2048] [--global-batch
16]

Text is tokenized during the measurement, .bin files were encoded before. No step uses the batches, and prefetch is off,
so the numbers are the most that one core can deliver; with prefetch this work runs while steps run.
"""

import argparse
import tempfile
import time
from pathlib import Path

from titan_hydra import cli, data
from titan_hydra.config import from_dict, schema
from titan_hydra.config.registry import DATA_SOURCES
from titan_hydra.data.embedded import Embedded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--global-batch", type=int, default=16)
    args = parser.parse_args()
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
    """Write the embedded corpus as text files, and as the .bin file that `titan tokenizer encode` makes of them."""
    corpus = Embedded()
    for unit in range(corpus.units):
        for _, text in corpus.rows(unit):
            (folder / f"{unit:05}.txt").write_text(text)
    cli.main(
        [
            "tokenizer",
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
