"""`titan from-torchtitan`: every key of TorchTitan 0.2.2's JobConfig is translated or named, and the line composes to
what a file says.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from titan_hydra import cli
from titan_hydra.base.errors import ConfigError
from titan_hydra.commands import from_torchtitan as torchtitan
from titan_hydra.config.compose import compose_unchecked

HERE = Path(__file__).parent
# every key of the wheel's JobConfig, with its default
THEIRS = json.loads((HERE / "torchtitan-0.2.2.json").read_text())
DOCS = (HERE.parents[1] / "docs/from-torchtitan.md").read_text()

PAPER_405B = """
[job]
description = "Llama 3 405B"
[profiling]
enable_profiling = true
save_traces_folder = "elsewhere"
profile_freq = 100
[metrics]
enable_tensorboard = true
[model]
name = "llama3"
flavor = "405B"
tokenizer_path = "./assets/tokenizer.model"
converters = "float8"
[optimizer]
lr = 8e-5
[lr_scheduler]
warmup_steps = 600
[training]
batch_size = 2
seq_len = 8192
steps = 3000
compile = true
dataset = "c4"
enable_cpu_offload = true
[parallelism]
data_parallel_replicate_degree = 2
tensor_parallel_degree = 8
enable_async_tensor_parallel = true
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "interleaved1f1b"
[checkpoint]
enable_checkpoint = true
async_mode = "async"
interval = 250
[activation_checkpoint]
mode = "full"
[float8]
enable_fsdp_float8_all_gather = true
filter_fqns = "attention.wk,output"
"""


def translated(tmp_path, capsys, content):
    """The job of the printed line, and the comments below it."""
    file = tmp_path / "file.toml"
    file.write_text(content)
    assert cli.main(["from-torchtitan", str(file)]) == 0
    out = capsys.readouterr().out
    line, _, comments = out.partition("\n# ")
    assert all(len(part) < 130 for part in line.splitlines())
    words = shlex.split(line.replace("\\\n", ""))
    assert words[:2] == ["python", "launch.py"]
    return compose_unchecked(*words[2:]), words[2:], comments


def test_the_table_has_every_key_with_its_default():
    assert torchtitan.DEFAULTS == THEIRS


def other(name, value):
    """Another value for a key than its default."""
    words = {
        "model.flavor": "8B",
        "training.dataset": "c4",
        "checkpoint.async_mode": "async",
        "activation_checkpoint.mode": "none",
        "activation_checkpoint.selective_ac_option": "op",
        "model.converters": ["float8"],
        "debug.seed": 5,
        "optimizer.name": "Adam",
        "parallelism.pipeline_parallel_schedule": "GPipe",
        "parallelism.module_fqns_per_model_part": [["a"], ["layers.2", "b"]],
        "checkpoint.export_dtype": "bfloat16",
        "quantize.linear.float8.recipe_name": "rowwise",
        "comm.mode": "fake_backend",
        "fault_tolerance.semi_sync_method": "diloco",
        "parallelism.context_parallel_load_balancer": "ptrr",
        "compile.components": ["loss"],
        "training.dtype": "bfloat16",
        "training.mixed_precision_param": "float32",
        "training.mixed_precision_reduce": "bfloat16",
        "parallelism.fsdp_reshard_after_forward": "never",
        "parallelism.context_parallel_rotate_method": "alltoall",
        "lr_scheduler.decay_type": "sqrt",
        "quantize.linear.mx.filter_fqns": ["output", "wq"],
    }
    if name in words:
        return words[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float) or name.endswith(("steps", "factor", "ratio", "per_stage")):
        return 0.25 if isinstance(value, float) else 4
    return ["x"] if isinstance(value, list) else "elsewhere"


# Keys that mean something only where others are on.
BESIDE = {
    "quantize.linear.float8": {"model.converters": ["quantize.linear.float8"]},
    "quantize.linear.mx": {"model.converters": ["mx"]},
    "validation": {"validation.enable": True},
    "checkpoint": {"checkpoint.enable": True},
    "profiling": {"profiling.enable_profiling": True},
    "fault_tolerance": {"fault_tolerance.enable": True},
    "parallelism": {"parallelism.pipeline_parallel_degree": 4},
    "compile": {"compile.enable": True},
    "activation_checkpoint.memory_budget": {"activation_checkpoint.mode": "memory_budget"},
    "checkpoint.initial_load_in_hf": {"checkpoint.enable": True, "checkpoint.initial_load_path": "x"},
    "checkpoint.last_save_model_only": {"checkpoint.enable": True, "checkpoint.export_dtype": "float32"},
}


@pytest.mark.parametrize("name", THEIRS)
def test_a_key_changes_the_line_or_is_named(name, monkeypatch):
    monkeypatch.setattr(torchtitan, "compose_unchecked", COMPOSED)
    if name == "model.name":
        return  # refused: below
    beside = next((BESIDE[part] for part in (name, name.rpartition(".")[0]) if part in BESIDE), {})
    beside = {key: value for key, value in beside.items() if key != name}
    before, _ = torchtitan.translate(beside)
    after, without = torchtitan.translate(beside | {name: other(name, THEIRS[name])})
    assert before != after or name in [row.key for row in without]


@pytest.fixture(scope="module", autouse=True)
def composed_once():
    """Composing takes a third of a second, and the table has 149 keys."""
    known = {}
    global COMPOSED

    def COMPOSED(*overrides):
        if overrides not in known:
            known[overrides] = compose_unchecked(*overrides)
        return known[overrides]


JUNK = ("x", "", 5, 0, -1, 1.5, True, False, [], ["a"], [[]], [["a", "b"]], {"a": 1})


def test_a_wrong_value_is_one_line_or_is_handed_on(monkeypatch):
    monkeypatch.setattr(torchtitan, "compose_unchecked", COMPOSED)
    refused = 0
    for name in [*THEIRS, *torchtitan.TABLE["earlier"], "parallelism", "checkpoint.async_mode.x"]:
        for junk in JUNK:
            content, place = {}, name.split(".")
            for part in reversed(place):
                content = {part: content if content or part != place[-1] else junk}
            try:
                torchtitan.translate(BESIDE.get(name.rpartition(".")[0], {}) | torchtitan.read_toml(content))
            except ConfigError as error:
                assert str(error).count("\n") == 0
                refused += 1
    assert refused > 900


def test_a_file_of_the_papers_time(tmp_path, capsys):
    job, words, comments = translated(tmp_path, capsys, PAPER_405B)
    assert (job.model.name, job.steps, job.optimizer.lr, job.lr_scheduler.warmup_steps) == ("llama3_405b", 3000, 8e-5, 600)
    assert (job.lr_scheduler.decay_ratio, job.data.name, job.data.seq_len, job.data.local_batch) == (1, "c4", 8192, 2)
    assert (job.tokenizer.name, job.tokenizer.path, job.notes) == ("tiktoken", "./assets/tokenizer.model", "Llama 3 405B")
    layout = job.parallelism
    assert (layout.name, layout.dp_replicate, layout.dp_shard, layout.tp, layout.pp, layout.async_tp) == ("hsdp", 2, -1, 8, 4, True)
    assert (job.pp_schedule.name, job.pp_schedule.microbatches, job.compile.name, job.ac.name) == ("interleaved_1f1b", 2, "block", "full")
    assert (job.precision.recipe, job.precision.float8_all_gather, job.precision.skip) == ("tensorwise", True, ["attention.wk", "output"])
    assert (job.checkpoint.name, job.checkpoint.interval, job.checkpoint.keep_latest_k) == ("async", 250, 10)
    assert (job.metrics.trackers, job.profiling.name, job.profiling.first_step) == (["tensorboard"], "on", 100)
    assert "not there: training.enable_cpu_offload=true" in comments and "not needed: profiling.save_traces_folder=elsewhere" in comments
    assert not {word.partition("=")[0] for word in words} & {"optimizer.beta1", "data.seq_len", "precision.recipe"}, "so anyway"


def test_an_empty_file_is_torchtitans_defaults(tmp_path, capsys):
    job, _, comments = translated(tmp_path, capsys, "")
    assert (job.model.name, job.steps, job.optimizer.lr, job.data.seq_len, job.data.local_batch) == ("llama3_debug", 10000, 8e-4, 2048, 8)
    assert (job.ac.name, job.ac.every, job.checkpoint.name, job.lr_scheduler.warmup_steps, job.seed) == ("layer", 2, "off", 200, 0)
    assert "training.dataset=c4_test" in comments


@pytest.mark.parametrize(
    "content, message",
    [
        ('[model]\nname = "qwen3"', "model.name=qwen3 model.flavor=debugmodel: no such model here; there are llama3's debugmodel, 8B"),
        ("[training]\nbatchsize = 1", "training.batchsize: TorchTitan 0.2.2 has no such key; did you mean training.batch_size"),
        ("[training", "file.toml: "),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, capsys, content, message):
    file = tmp_path / "file.toml"
    file.write_text(content)
    assert cli.main(["from-torchtitan", str(file)]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
    assert cli.main(["from-torchtitan", str(tmp_path / "none.toml")]) == 2 and "No such file" in capsys.readouterr().err


def test_the_page_names_every_key_in_its_section():
    sections = re.split(r"^## ", DOCS, flags=re.M)[1:]
    for name in [*THEIRS, *torchtitan.TABLE["earlier"]]:
        group, _, key = name.partition(".")
        text = next(text for text in sections if group in re.findall(r"[\w]+", text.partition("\n")[0]))
        assert re.search(rf"`[^`]*\b{key.rpartition('.')[2]}\b[^`]*`", text), name
    for name, (_, key, *_) in torchtitan.TABLE["values"].items():
        row = next(line for line in DOCS.splitlines() if re.match(rf"\| .*`{name.partition('.')[2]}`.* \|", line))
        assert re.search(rf"`[^`]*{re.escape(key.partition('.')[2] or key)}\b", row.split("|")[2]), (name, row)
