"""Turn measurements of training into jobs of this trainer, and compare each with its prediction.

`titan report --row` and benchmarks/gpu/run.py write the rows of runs; benchmarks/planner/published.yaml has published
rows, with their sources. A row is skipped, with the reason, if its model, number format or device cannot be predicted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.freeze import freeze
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.compose.describe import option_files
from titan_hydra.experiments.plan import memory, time
from titan_hydra.experiments.plan.predict import TIGHT
from titan_hydra.experiments.plan.shape import NotPredictable, Shape, shape_of

OWN = "titan_hydra"  # first word of `source` in rows of this trainer
STACKS = ({"match": [OWN], "compiled_loss": True},)  # what is known of a source's software; a file may say more
# the beginnings of what rows say of recomputation, and the modes of activation checkpointing that these mean; the first
# that fits counts
MODES = {"graph SAC": "op", "selective (attention": "op", "selective (op": "op", "selective": "layer"} | {
    name: name for name in ("full", "none", "op", "lean", "layer")
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Scored:
    """A row with its prediction: tokens/s per device and GiB, each as (measured, predicted). `apart` is None or the
    reason why the row is left out of the statistics. `shape` is the shape from which the time was predicted.
    """

    row: Row
    overrides: tuple[str, ...]
    speed: tuple[float, float]
    memory: tuple[float, float] | None
    apart: str | None
    shape: Shape

    @property
    def error(self) -> float:
        """The relative error of the predicted speed. If it is above 0, the predicted speed is too high."""
        return self.speed[1] / self.speed[0] - 1

    @property
    def deviation(self) -> float:
        """The relative deviation of the measured speed from the predicted speed, which the printed band bounds."""
        return self.speed[0] / self.speed[1] - 1

    @property
    def technique(self) -> str:
        """The techniques of the row's layout, such as `dense, tp pp`."""
        degrees = [name for name in ("tp", "cp", "pp", "ep") if self.row.get(name, 1) > 1]
        return f"{'experts' if self.shape.experts else 'dense'}, {' '.join(degrees) or 'data parallel'}"


def rows_of(file: Path) -> list[Row]:
    """Return the rows of a file. Each row also gets the keys that are common to all rows of its source, and the entry
    of `stacks` that describes the source's software. A file is a list of rows, or has the form of
    benchmarks/planner/published.yaml. Raises ConfigError.
    """
    stacks: list[dict[str, Any]] = [*STACKS]
    shapes: dict[str, Any] = {}
    try:
        content = yaml.safe_load(file.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: cannot be read: {str(error).splitlines()[0]}") from error
    if isinstance(content, dict):
        stacks, shapes = [*stacks, *content.get("stacks", ())], content.get("shapes", {})
        content = [
            source.get("common", {}) | row | {"source": source.get("source")}
            for source in content.get("sources", ())
            for row in source.get("rows", ())
        ]
    if (
        not isinstance(content, list)
        or not content
        or not all(isinstance(row, dict) and "id" in row for row in content)
    ):
        raise ConfigError(f"{file}: is not a list of rows with an id each, as `titan report --row` writes")
    for row in content:
        names = " ".join(str(row.get(name)) for name in ("source", "model", "hardware"))
        row["stack"] = next((stack for stack in stacks if all(part in names for part in stack["match"])), {})
        row.setdefault("shape", shapes.get(row.get("model")))
    return content


def score(row: Row) -> Scored:
    """Predict a row. If this is impossible, raises NotPredictable or ConfigError with the reason."""
    hardware = _hardware(row)
    if missing := [name for name in ("gpus", "global_batch", "seq_len", "precision") if name not in row]:
        raise NotPredictable(f"{missing[0]}: is not given")
    if row["global_batch"] % row.get("dp", 1):
        raise NotPredictable(f"global_batch={row['global_batch']}: is no multiple of dp={row['dp']}")
    modes = [mode] if (mode := mode_of_row(row)) else ["none", "op", "full"]
    jobs = [(mode, _composed(*overrides_of(row, hardware, mode))) for mode in modes]
    mode, job = _likely(row, jobs)
    peak = _peak(row, job)
    overrides = overrides_of(row, hardware, mode, timed=True)
    job = _composed(*overrides)
    shape = _as_run(row, _shape(row, job))
    apart = row.get("apart")
    if apart is None and "power limited" in row.get("device", ""):
        apart = "power-limited cards, as the source says"
    known = (
        mode_of_row(row) is not None
        and "graph" not in str(row.get("compile"))
        and "Simple" not in str(row.get("compile"))
    )
    return Scored(
        row=row,
        overrides=tuple(overrides),
        speed=(measured_speed(row, job), time.speed(job, shape=shape).tokens_per_second),
        memory=(row["memory_gib"], peak) if "memory_gib" in row and known else None,
        apart=apart,
        shape=shape,
    )


def _shape(row: Row, job: Job) -> Shape:
    """Return the shape of a row's job. Trainers other than this one checkpoint compiled blocks of experts as a whole, and
    wrap a model with FSDP on one rank too, if their row says that it is wrapped.
    """
    shape, ours = shape_of(job), str(row.get("source")).startswith(OWN)
    wrapped = not ours and row["gpus"] == 1 and str(row.get("dp_kind")).startswith("fsdp")
    return replace(shape, whole_blocks=not ours, wrapped=shape.wrapped or wrapped)


def _peak(row: Row, job: Job) -> float:
    return memory.peak(job, _constants(row), _shape(row, job)).gib


def _as_run(row: Row, shape: Shape) -> Shape:
    """Return a shape with the properties of the trainer that ran a row.

    Megatron sends weights and gradients while the pipeline fills and drains or, with experts, while the last of many
    microbatches is computed, so this takes no time of its own. Its experts compute in the number format, and it balances
    them with random scores. Some of its recipes exchange the rows of one microbatch while they compute another.
    """
    shape = replace(shape, transformer_engine=_of_megatron(row) or _has_te(row))
    if not _of_megatron(row):
        return shape
    shape = replace(shape, adds_in_matmuls=True)
    if not shape.experts:  # context-parallel ranks share no weights, so a microbatch gathers none
        return replace(shape, shards=1, wrapped=shape.job.parallelism.pp == 1)
    experts = replace(shape.experts, in_turn=False)
    overlaps, graphs = (row["stack"].get(name, False) for name in ("overlaps", "graphs"))
    return replace(shape, wrapped=False, experts=experts, hidden_exchange=overlaps, captured=graphs)


@cache  # cached, as most rows have the same overrides for their memory and for their time
def _composed(*overrides: str) -> Job:
    return freeze(compose_unchecked(*overrides))


def _likely(row: Row, jobs: list[tuple[str, Job]]) -> tuple[str, Job]:
    """Return the job that a source probably ran, if the source does not name its mode of recomputation. It is the job
    whose memory is nearest to the measured memory. Without a measurement, it is the job that recomputes least among
    those that fit.
    """
    if "memory_gib" in row:
        return min(jobs, key=lambda pair: abs(_peak(row, pair[1]) - row["memory_gib"]))

    return next((pair for pair in jobs if memory.peak(pair[1]).gib <= TIGHT * pair[1].hardware.memory_gib), jobs[-1])


def _constants(row: Row) -> memory.Constants:
    compiled = row["stack"].get("compiled_loss") or "loss" in str(row.get("compile"))
    return memory.Constants() if compiled else memory.TORCHTITAN[row.get("tp", 1) > 1]


def overrides_of(row: Row, hardware: str, mode: str, timed: bool = False) -> list[str]:
    """Return a row as overrides of a job. If the overrides are for predicting the time (`timed`), ZeRO-1 is replaced by
    replicas, because both send gradients once in a step.
    """
    tp, pp, cp, dp = (row.get(name, 1) for name in ("tp", "pp", "cp", "dp"))
    kind, samples, micro = str(row.get("dp_kind")), row["global_batch"] // dp, row.get("micro_batch", 1)
    replicas = 1
    if kind.startswith(("ddp", "none")) or (timed and _of_megatron(row)):
        replicas = dp // max(row.get("ep", 1) // (tp * cp), 1)
    elif kind.startswith("hsdp"):
        replicas = max(dp // 8, 1)
    lines = ["data=synthetic", "comm=fake", f"hardware={hardware}", *_model(row), *_precision(row), f"ac={mode}"]
    lines += [
        f"data.seq_len={row['seq_len']}",
        f"model.max_seq_len={row['seq_len']}",
        f"data.global_batch={row['global_batch']}",
    ]
    degrees = {
        "dp_replicate": replicas,
        "dp_shard": dp // replicas,
        "tp": tp,
        "cp": cp,
        "pp": pp,
        "ep": row.get("ep", 1),
    }
    lines += [f"gpus={row['gpus']}", *(f"parallelism.{name}={degree}" for name, degree in degrees.items())]
    if "ZeRO-2" in kind or (_of_megatron(row) and not timed) or "never" in str(row.get("note")):
        lines.append("parallelism.reshard_after_forward=never")
    if pp > 1:
        stages = row.get("virtual_stages", 1)
        lines += [
            f"pp_schedule={row.get('schedule', 'interleaved_1f1b' if stages > 1 else '1f1b')}",
            f"data.local_batch={samples}",
        ]
        lines += [f"pp_schedule.stages_per_rank={stages}"] * (stages > 1) + [
            f"pp_schedule.microbatches={samples // micro}"
        ]
    else:
        lines.append(f"data.local_batch={max(min(micro, samples), 1)}")
    nic = [f"hardware.nic_gbs={row['nic_gbs']}"] if "nic_gbs" in row else []
    return [*lines, *_software(row), *nic, *row.get("stack", {}).get("overrides", []), *row.get("overrides", [])]


def _software(row: Row) -> Iterator[str]:
    """Yield overrides for the kernels and libraries that ran a row."""
    # Megatron has fused kernels, overlaps all-gathers with matmuls, and uses cuDNN's kernel in ring attention
    if _of_megatron(row):
        yield from ("compile=block", "precision.reduce_dtype=bfloat16")
        if not any("model.attention" in line for line in row["stack"].get("overrides", ())):
            yield "hardware.flash_tflops=null"
        if row.get("tp", 1) > 1:
            yield "parallelism.async_tp=true"
    else:
        yield f"compile={'off' if _eager(row) else 'block'}"
    if "balance" in str(row.get("routing")):
        yield "debug.balance_experts=true"
    if "loss chunks" in str(row.get("compile")):
        yield from ("loss=linear_cross_entropy", f"loss.chunk_tokens={row.get('micro_batch', 1) * row['seq_len'] // 8}")
    if "DeepEP" in f"{row.get('kernels')} {row.get('note')}":
        yield "hardware.dispatcher=deep_ep"


def measured_speed(row: Row, job: Job) -> float:
    """Return a row's tokens/s per device, which may follow from the row's TFLOP/s or from its time of a step."""
    if "tokens_per_second_per_gpu" in row:
        return float(row["tokens_per_second_per_gpu"])
    if "step_seconds" in row:
        return row["global_batch"] * row["seq_len"] / row["step_seconds"] / row["gpus"]
    model, length = job.model, row["seq_len"]
    if row.get("formula") == "hardware":  # arXiv 2104.04473, equation 3: 96 B s l h^2 (1 + s / 6h + V / 16lh)
        layers, dim = model.n_layers, model.dim
        flops = 96 * layers * dim**2 * (1 + length / (6 * dim) + model.vocab_size / (16 * layers * dim))
    else:  # of causal attention's FLOPs, Megatron counts half, NeMo counts all
        attention = length * model.dim * (2 if row.get("formula") == "nemo" else 1)
        block = 2 * model.dim**2 * (1 + model.n_kv_heads / model.n_heads) + 3 * model.dim * model.ffn_width + attention
        flops = 6 * (model.n_layers * block + model.dim * model.vocab_size)
    return row["tflops_per_gpu"] * 1e12 / flops


def _of_megatron(row: Row) -> bool:
    return str(row.get("dp_kind")).startswith("zero1")


def _eager(row: Row) -> bool:
    compiled = str(row.get("compile", False))
    return not _has_te(row) and (compiled == "False" or "aot_eager" in compiled)


def _has_te(row: Row) -> bool:
    """Whether Transformer Engine's kernels ran a row; they are fused without a compiler."""
    return "TE" in str(row.get("kernels")).split()


def _hardware(row: Row) -> str:
    """Return the hardware preset of a row: the preset for the row's device and the year of its software or, if there is
    none, the preset for the device only.
    """
    name = row["hardware"]
    if name == "h100" and ("95 GiB" in row.get("device", "") or "500 W" in row.get("device", "")):
        name = "h100_500w"
    known = {file.stem for file in option_files("hardware")}
    dated = f"{name}_{row['stack'].get('software')}"
    if name not in known:
        raise NotPredictable(f"hardware={name}: has no preset")
    return dated if dated in known else name


def _model(row: Row) -> Iterator[str]:
    """Yield the overrides of a row's model. A feed-forward without a gate has two matrices; it is replaced by three
    matrices of two thirds the width.
    """
    shape = row.get("shape")
    if not shape:
        if row["model"] not in {file.stem for file in option_files("model")}:
            raise NotPredictable(f"model={row['model']}: its shape is not known")
        yield f"model={row['model']}"
        return
    yield "model=llama3_8b"
    gated = shape.get("gated", "ungated" not in str(shape.get("ffn")))
    ffn = shape["ffn"] if isinstance(shape["ffn"], int) else 4 * shape["dim"]
    yield f"model.ffn_dim={ffn if gated else round(ffn / 96) * 64}"
    yield f"model.head_dim={shape['dim'] // shape['n_heads']}"
    yield f"model.tie_embeddings={str(shape.get('tied', False)).lower()}"
    yield from (f"model.{name}={shape[name]}" for name in ("dim", "n_heads", "n_kv_heads", "n_layers", "vocab_size"))


def _precision(row: Row) -> list[str]:
    """Return the overrides of a row's number format. Raises NotPredictable."""
    name = row["precision"]
    if name.startswith("bf16 weights"):
        return ["precision=bf16_full"]
    if name.startswith(("bf16", "fp16")):
        return ["precision=bf16"]
    if name.startswith("fp8") or "tensorwise" in name:
        return ["precision=float8_tensorwise"]
    if "rowwise" in name:
        return ["precision=float8_rowwise", *(["precision.recipe=rowwise_with_gw_hp"] if "gw_hp" in name else [])]
    for known in ("mxfp8", "fp32"):
        if name.startswith(known):
            return [f"precision={known}"]
    raise NotPredictable(f"precision={name}: is not a format of this trainer")


def mode_of_row(row: Row) -> str | None:
    """Return the mode of activation checkpointing that a row names, else the one that its software is known to use; None if
    neither is known.
    """
    text = row.get("recompute", "not said")
    # a row may name a mode and say only that the share of blocks with it is not said
    if "not said" in text and "share" not in text:
        return None
    named = next((mode for start, mode in MODES.items() if text.startswith(start)), None)
    return named or row["stack"].get("recompute")
