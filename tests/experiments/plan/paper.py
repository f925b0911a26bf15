"""Compose the rows of the paper and of other sources as jobs, and show measured values beside predicted ones.

python -m tests.experiments.plan.paper     # prints the tables of docs/plan.md
"""

import functools
from dataclasses import replace
from pathlib import Path

import yaml

from titan_hydra.core.job.config import Job
from titan_hydra.core.job.freeze import freeze
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan import memory, time
from titan_hydra.experiments.plan.shape import shape_of

HERE = Path(__file__).parent
TABLES = yaml.safe_load((HERE.parent / "report" / "paper.yaml").read_text())
H200 = yaml.safe_load((HERE / "h200.yaml").read_text())
HELD_OUT = yaml.safe_load((HERE / "held_out.yaml").read_text())
KEYS = {
    "model": "model",
    "gpus": "gpus",
    "dp_shard": "parallelism.dp_shard",
    "tp": "parallelism.tp",
    "cp": "parallelism.cp",
    "pp": "parallelism.pp",
    "async_tp": "parallelism.async_tp",
    "local_batch": "data.local_batch",
    "seq_len": "data.seq_len",
    "global_batch": "data.global_batch",
    "ac": "ac",
    "pp_schedule": "pp_schedule",
}


def rows() -> list[tuple[str, dict]]:
    """Return all 18 rows: the name of the table, and the row with the values that its table shares."""
    return [
        (table, {"seq_len": 8192} | content["common"] | row)
        for table, content in TABLES.items()
        for row in content["rows"]
    ]


def held_out() -> list[dict]:
    return [{"seq_len": 8192, "compile": True} | row for row in HELD_OUT]


def job_of(row: dict) -> Job:
    """Return a row as a job. The job is cached, so do not change it."""
    return composed(tuple(row.items()))


@functools.cache
def composed(items: tuple) -> Job:
    """Compose a row with torch's flash attention and as many microbatches as pipeline ranks, as in the paper."""
    row = dict(items)
    lines = [
        f"{KEYS[key]}={str(value).lower() if isinstance(value, bool) else value}"
        for key, value in row.items()
        if key in KEYS
    ]
    lines += [f"pp_schedule.microbatches={row['pp']}"] if "pp" in row else []
    lines += ["compile=block"] * bool(row.get("compile")) + ["precision=float8_tensorwise"] * bool(row.get("float8"))
    return freeze(
        compose_unchecked(
            "data=synthetic",
            "model.attention=flash",
            "model.max_seq_len=262144",
            "hardware=h100_500w",
            "comm=fake",
            *lines,
        )
    )


def of_then(row: dict, table: str = "") -> memory.Constants:
    """Return the terms that differed with the torch of 2024: the pools of several streams were more fragmented, the
    loss was not compiled, and a pipeline schedule kept the logits of all microbatches, at first in float32.
    """
    kept = {"table4": 4, "table6": 2}.get(table, 2 if "pp" in row else 0)
    return replace(memory.TORCHTITAN["tp" in row], kept_logits=kept)


def measured_and_predicted(row: dict, table: str = "") -> tuple[float | None, float, float, float]:
    """Return peak GiB and tokens per second of a GPU, each measured and predicted."""
    job = job_of(row)
    return (
        row.get("memory"),
        memory.peak(job, of_then(row, table)).gib,
        row["throughput"],
        time.speed(job).tokens_per_second,
    )


def on_h200(row: dict) -> tuple[float, float, float, float]:
    """Return peak GiB and tokens per second, each measured and predicted, for a row of the H200. TorchTitan wraps a
    model with FSDP even at degree 1; our models (`ours`) are not wrapped on one rank.
    """
    job = freeze(
        compose_unchecked(
            "data=synthetic",
            *([] if "data.seq_len" in row["job"] else ["data.seq_len=8192"]),
            "hardware=h200",
            "comm=fake",
            "gpus=1",
            "parallelism=single",
            *row["job"].split(),
        )
    )
    shape = replace(shape_of(job), wrapped=not row.get("ours"))
    return (
        row["memory"],
        memory.peak(job, shape=shape).gib,
        row["throughput"],
        time.speed(job, shape=shape).tokens_per_second,
    )


def markdown() -> str:
    """Return the tables of docs/plan.md."""
    head = (
        "| row | GiB measured | predicted | error | tokens/s measured | predicted | error | ratio in its table |\n"
        + "|---" * 8
        + "|"
    )
    lines, first = [head], {}
    for table, row in rows():
        numbers = measured_and_predicted(row, table)
        ratio = numbers[3] / numbers[2]
        first.setdefault(table, ratio)
        lines.append(line(f"T{table[-1]} {row['name']}", numbers, f"{ratio / first[table] - 1:+.1%}"))
    lines += ["", head.replace("ratio in its table", "blind")]
    lines += [line(row["name"], measured_and_predicted(row), "no" if row.get("seen") else "yes") for row in held_out()]
    lines += ["", head.replace("ratio in its table", "rates fitted to it")]
    lines += [line(row["name"], on_h200(row), "yes" if row.get("fitted") else "no") for row in H200]
    return "\n".join(lines)


def line(name: str, numbers: tuple[float | None, float, float, float], last: str) -> str:
    gib, peak, rate, predicted = numbers
    left = f"{gib:.1f} | {peak:.1f} | {peak / gib - 1:+.1%}" if gib else f"- | {peak:.1f} | -"
    return f"| {name} | {left} | {rate:,.0f} | {predicted:,.0f} | {predicted / rate - 1:+.1%} | {last} |"


if __name__ == "__main__":
    print(markdown())
