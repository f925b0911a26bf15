"""`titan from-torchtitan FILE.toml`: print the command line that trains what one of TorchTitan's files trains, and the
keys without a counterpart.

The table of keys is assets/torchtitan.yaml. A file omits TorchTitan's defaults, which may differ from those here:
defaults are therefore translated too, and values that launch.py uses anyway are left out.
"""

import argparse
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from titan_hydra.base.errors import ConfigError, Exit
from titan_hydra.config.compose import compose_unchecked
from titan_hydra.config.fault import as_typed, as_value, did_you_mean, suggest
from titan_hydra.config.files import ASSETS, CONF
from titan_hydra.config.load import to_dict
from titan_hydra.runs.records import flat

TABLE = yaml.safe_load((ASSETS / "torchtitan.yaml").read_text())
MISSING, NEEDLESS = "not there", "not needed"
WITHOUT = {
    name: (default, kind, reason)
    for section, kind in (("missing", MISSING), ("needless", NEEDLESS))
    for reason, keys in TABLE[section].items()
    for name, default in keys.items()
}
DEFAULTS = {
    **{name: row[0] for name, row in TABLE["values"].items()},
    **TABLE["choices"],
    **{name: row[0] for name, row in WITHOUT.items()},
}
NONE = {"model_part": "list of lists", "ratio": "number", "steps": "number", "per_stage": "number", "factor": "number", "seed": "number"}
KINDS = {
    name: {bool: "bool", int: "number", float: "number", str: "text", list: "list"}.get(
        type(default), next((kind for end, kind in NONE.items() if name.endswith(end)), "text")
    )
    for name, default in DEFAULTS.items()
}
MODELS = {"debugmodel": "llama3_debug", "8B": "llama3_8b", "70B": "llama3_70b", "405B": "llama3_405b"}
SCHEDULES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "loopedbfs": "looped_bfs",
    "interleaved1f1b": "interleaved_1f1b",
    "zbvzerobubble": "zbv",
    "interleavedzerobubble": "interleaved_zb",
    "dualpipev": "dualpipe_v",
    "pipelineschedulesingle": "csv",
    "pipelineschedulemulti": "csv",
    "_pipelinescheduleruntime": "csv",
}


class Without(NamedTuple):
    """A key whose value has no counterpart here, and the reason."""

    key: str
    kind: str
    reason: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE.toml", help="a configuration file of TorchTitan (0.2.2, or earlier)")


def main(args: argparse.Namespace) -> int:
    """Print the command line and, as shell comments, what it leaves out."""
    try:
        given = read_toml(tomllib.loads(args.file.read_text()))
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{args.file}: {getattr(error, 'strerror', None) or error}") from error
    overrides, without = translate(given)
    lines = ["python launch.py"]
    for word in map(shlex.quote, overrides):
        lines[-1:] = [f"{lines[-1]} {word}"] if len(lines[-1]) + len(word) < 120 else [lines[-1], f"  {word}"]
    print(" \\\n".join(lines))
    for kind in (MISSING, NEEDLESS):
        for key, _, reason in (row for row in without if row.kind == kind):
            print(f"# {kind}: {key}={as_typed((DEFAULTS | given)[key])}: {reason}")
    print("# torchrun's number of GPUs is gpus=N here, and cluster=slurm submits; launch.mode=dry checks it all. docs/from-torchtitan.md")
    return Exit.DONE


def read_toml(content: dict) -> dict[str, Any]:
    """Return the values of a file by TorchTitan's present dotted names, comma-separated strings as lists where the key
    is one.

    Raises ConfigError for a key that TorchTitan never had, and for a value of the wrong type.
    """
    values = {}
    for name, value in flat(content).items():
        name = re.sub(r"^(float8|mx)\.", r"quantize.linear.\1.", TABLE["earlier"].get(name, name))
        if name not in DEFAULTS:
            hint = did_you_mean(suggest(name, [*DEFAULTS, *TABLE["earlier"]]))
            raise ConfigError(f"{name}: TorchTitan 0.2.2 has no such key{hint}")
        if isinstance(DEFAULTS[name], list) and isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        if name == "activation_checkpoint.selective_ac_option":
            value = str(value)
        if not _is(value, KINDS[name]):
            raise ConfigError(f"{name}={as_typed(value)}: is a {KINDS[name]} in TorchTitan")
        values[name] = value
    return values


def _is(value: Any, kind: str) -> bool:
    """Whether a value of a TOML file is of a kind."""
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind.startswith("list"):
        return isinstance(value, list) and all(_is(entry, "list" if kind == "list of lists" else "text") for entry in value)
    return isinstance(value, bool if kind == "bool" else str)


def translate(given: dict[str, Any]) -> tuple[list[str], list[Without]]:
    """Return the overrides of launch.py, and the given values that they leave out. Raises ConfigError for a model that
    is not here.
    """
    values = DEFAULTS | given
    without = [Without(name, kind, reason) for name, (default, kind, reason) in WITHOUT.items() if values[name] != default]
    plain = {key: here[0] if here and values[name] == default else values[name] for name, (default, key, *here) in TABLE["values"].items()}
    chosen = {}
    for row in options(values, given):
        if isinstance(row, Without):
            without.append(row)
        else:
            (plain if "." in row[0] else chosen)[row[0]] = row[1]
    default = compose_unchecked()
    chosen = {group: option for group, option in chosen.items() if getattr(default, group).name != option}
    composed = flat(to_dict(compose_unchecked(*(f"{group}={option}" for group, option in chosen.items()))))
    changed = {key: value for key, value in plain.items() if composed[key] != value}
    return [f"{key}={_typed(value)}" for key, value in (chosen | changed).items()], without


def options(of: dict[str, Any], given: dict[str, Any]) -> Iterator[tuple[str, Any] | Without]:
    """Yield the options chosen from groups with the values that belong to them, and a `Without` for what cannot be
    translated.
    """
    yield from _model(of)
    yield from _data(of)
    yield from _layout(of)
    yield from _precision(of)
    yield from _checkpoint(of, given)
    yield from _rest(of)


def _model(of: dict[str, Any]) -> Iterator[tuple[str, Any] | Without]:
    flavor, _, attention = of["model.flavor"].partition("_")
    if of["model.name"] != "llama3" or flavor not in MODELS:
        raise ConfigError(
            f"model.name={of['model.name']} model.flavor={of['model.flavor']}: no such model here; there are llama3's " + ", ".join(MODELS)
        )
    yield "model", MODELS[flavor]
    if attention:
        yield "data.document_mask", True
    assets, file = of["model.hf_assets_path"], of["model.tokenizer_path"]
    if flavor == "debugmodel":
        for name in ("model.hf_assets_path", "model.tokenizer_path"):
            if of[name] != DEFAULTS[name]:
                yield Without(name, NEEDLESS, "the small model has a tokenizer of its own")
    elif file and file.endswith(".model"):
        yield "tokenizer", "tiktoken"
        yield "tokenizer.path", file
    else:
        yield "tokenizer", "hf"
        yield "tokenizer.path", f"{file or assets}/tokenizer.json"


def _data(of: dict[str, Any]) -> Iterator[tuple[str, Any] | Without]:
    name, path = of["training.dataset"], of["training.dataset_path"]
    if name == "c4":
        yield "data", "c4"
        if path:
            yield "data.path", path
    else:
        yield "data", "embedded"
        yield Without("training.dataset", MISSING, "the embedded corpus takes its place; data=text_files data.path=FILES, or data=hf")
        if path:
            yield Without("training.dataset_path", MISSING, "data=text_files data.path=FILES takes text, jsonl and parquet")
    if of["validation.enable"]:
        yield "validation", "on"
        yield "validation.interval", of["validation.freq"]
        if of["validation.steps"] > 0:
            yield "validation.steps", of["validation.steps"]
        else:
            yield Without("validation.steps", MISSING, "validation.steps says how many global batches; all of them could hang")


def _layout(of: dict[str, Any]) -> Iterator[tuple[str, Any] | Without]:
    degree = {
        short: of[f"parallelism.{long}_degree"]
        for short, long in (
            ("replicate", "data_parallel_replicate"),
            ("shard", "data_parallel_shard"),
            ("tp", "tensor_parallel"),
            ("cp", "context_parallel"),
            ("pp", "pipeline_parallel"),
        )
    }
    data = ("fsdp" if degree["replicate"] == 1 else "hsdp") if degree["shard"] != 1 else "ddp" if degree["replicate"] != 1 else ""
    name = "_".join(filter(None, [data, *(short for short in ("tp", "cp", "pp") if degree[short] > 1)])) or "single"
    yield "parallelism", name if (CONF / f"parallelism/{name}.yaml").exists() else data or "single"
    yield "parallelism.loss_parallel", not of["parallelism.disable_loss_parallel"]
    balancer = of["parallelism.context_parallel_load_balancer"]
    if balancer == "ptrr":
        yield Without("parallelism.context_parallel_load_balancer", MISSING, "head and tail are paired instead")
    yield "parallelism.cp_load_balance", balancer is not None
    schedule = SCHEDULES.get(of["parallelism.pipeline_parallel_schedule"].lower())
    if schedule is None:
        yield Without("parallelism.pipeline_parallel_schedule", MISSING, f"there are {', '.join(dict.fromkeys(SCHEDULES.values()))}")
    elif degree["pp"] > 1:
        yield "pp_schedule", schedule
    if degree["pp"] > 1:
        size = max(of["parallelism.pipeline_parallel_microbatch_size"], 1)
        yield "pp_schedule.microbatches", max(of["training.local_batch_size"] // size, 1)
    if parts := of["parallelism.module_fqns_per_model_part"]:
        yield "pp_schedule.split", [part[0] for part in parts[1:] if part]


def _precision(of: dict[str, Any]) -> Iterator[tuple[str, Any] | Without]:
    kinds = {name.removeprefix("quantize.linear.") for name in of["model.converters"]}
    float8, mx = ({name: of[f"quantize.linear.{kind}.{name}"] for name in ("recipe_name", "filter_fqns")} for kind in ("float8", "mx"))
    if unknown := kinds - {"float8", "mx"}:
        yield Without("model.converters", MISSING, f"no {' or '.join(sorted(unknown))} here; there are Float8 and MXFP8 linears")
    if "float8" in kinds:
        recipe = float8["recipe_name"] or "tensorwise"
        yield "precision", f"float8_{recipe.partition('_')[0]}"
        yield "precision.recipe", recipe
        yield "precision.float8_all_gather", of["quantize.linear.float8.enable_fsdp_float8_all_gather"]
        yield "precision.emulate", of["quantize.linear.float8.emulate"]
        yield "precision.skip", sorted({*float8["filter_fqns"], "output"})  # the head is never converted here
    elif "mx" in kinds:
        yield "precision", "mxfp8"
        yield "precision.skip", sorted({*mx["filter_fqns"], "output"})
        if mx["recipe_name"] != "mxfp8_cublas":
            yield Without("quantize.linear.mx.recipe_name", MISSING, "mxfp8_cublas alone")
    elif of["training.dtype"] == "bfloat16":
        yield "precision", "bf16_full"
    elif of["training.mixed_precision_param"] == "float32":
        yield "precision", "fp32"


def _checkpoint(of: dict[str, Any], given: dict[str, Any]) -> Iterator[tuple[str, Any] | Without]:
    kinds = {"disabled": "sync", "async": "async", "async_with_pinned_mem": "async_pinned"}
    mode = of["checkpoint.async_mode"]
    yield "checkpoint", kinds.get(mode, mode) if of["checkpoint.enable"] else "off"
    if not of["checkpoint.enable"]:
        return
    for name, key in (("interval", "interval"), ("keep_latest_k", "keep_latest_k"), ("enable_first_step_checkpoint", "first_step")):
        yield f"checkpoint.{key}", of[f"checkpoint.{name}"]
    if of["checkpoint.last_save_model_only"] and "checkpoint.export_dtype" in given:
        if of["checkpoint.export_dtype"] == "float16":
            yield Without("checkpoint.export_dtype", MISSING, "float32 or bfloat16")
        else:
            yield "checkpoint.export_dtype", of["checkpoint.export_dtype"]
    if path := of["checkpoint.initial_load_path"]:
        if of["checkpoint.initial_load_in_hf"]:
            yield "checkpoint.initial_load_path", path
        else:
            yield Without("checkpoint.initial_load_path", MISSING, "TorchTitan's own format is not read; last_save_in_hf writes one")


def _rest(of: dict[str, Any]) -> Iterator[tuple[str, Any] | Without]:
    if of["optimizer.name"] != "AdamW":
        yield Without("optimizer.name", MISSING, "AdamW takes its place; there are adamw, muon and sgd")
    mode, selective = of["activation_checkpoint.mode"], of["activation_checkpoint.selective_ac_option"]
    yield "ac", mode if mode != "selective" else "op" if selective == "op" else "layer"
    if mode == "selective" and selective != "op":
        if not selective.isdecimal():
            raise ConfigError(f"activation_checkpoint.selective_ac_option={selective}: TorchTitan takes op or a number")
        yield "ac.every", int(selective)
    if mode == "memory_budget":
        yield "ac.budget", of["activation_checkpoint.memory_budget"]
    if of["compile.enable"]:
        yield "compile", "block"
        if sorted(of["compile.components"]) != ["loss", "model"]:
            yield Without("compile.components", MISSING, "blocks and loss, both")
    if of["profiling.enable_profiling"] or of["profiling.enable_memory_snapshot"]:
        yield "profiling", "on"
        yield "profiling.first_step", max(of["profiling.profile_freq"] - of["profiling.profiler_active"] + 1, 2)
        yield "profiling.steps", of["profiling.profiler_active"]
        yield "profiling.memory", of["profiling.enable_memory_snapshot"]
    trackers = [name for name in ("tensorboard", "wandb") if of[f"metrics.enable_{name}"]]
    if trackers:
        yield "metrics", trackers[0]
        yield "metrics.trackers", trackers
    if of["comm.mode"] == "fake_backend":
        yield "comm", "fake"
    elif of["comm.mode"] != "default":
        yield Without("comm.mode", MISSING, "comm=fake steps one rank of any layout, without its neighbours' numbers")
    if of["debug.deterministic"]:
        yield "debug", "deterministic"
    if of["fault_tolerance.enable"]:
        yield "fault_tolerance", of["fault_tolerance.semi_sync_method"] or "torchft"
        yield "fault_tolerance.replicas", max(of["fault_tolerance.group_size"], 2)
        yield "fault_tolerance.timeout_seconds", max(of["fault_tolerance.process_group_timeout_ms"] // 1000, 1)


def _typed(value: Any) -> str:
    """Format a value of an override."""
    return as_value(value) if isinstance(value, str) else as_typed(value)
