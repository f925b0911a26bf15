"""Every rule refuses what it should and names the key and the nearest legal value, and an accepted job can build its
mesh.
"""

import copy
from dataclasses import fields
from operator import attrgetter

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_hydra.base.errors import ConfigError
from titan_hydra.config import from_dict
from titan_hydra.config.compose import CONF, compose_job
from titan_hydra.config.load import PICKED, picking, values_are_what_the_schema_takes
from titan_hydra.config.model import Model
from titan_hydra.config.rules import compile as rules_of_compile
from titan_hydra.config.rules.checks import LAYOUT, RECIPE, check, degrees_fill_the_ranks
from titan_hydra.job.freeze import freeze
from titan_hydra.parallel import build_mesh


@pytest.fixture(scope="module")
def base():
    return compose_job()


def changed(base, **values):
    """Return a frozen job with some values changed; `__` stands for the dot of a key."""
    job = copy.deepcopy(base)
    job.gpus = job.data.global_batch = None
    job.parallelism.dp_shard = -1
    for name, section in picking().items():
        pick = PICKED[section][0]
        if section is not Model and f"{name}__{pick}" in values:  # the section gets the keys of another part
            kept = {spec.name: getattr(getattr(job, name), spec.name) for spec in fields(section)}
            setattr(job, name, from_dict(section, kept | {pick: values[f"{name}__{pick}"]}))
    for key, value in values.items():
        *path, last = key.split("__")
        setattr(attrgetter(".".join(path))(job) if path else job, last, value)
    return freeze(job)


def test_the_default_job_is_legal(base):
    assert check(base) == []


README = str(CONF.parent / "README.md")
ZBV = {"parallelism__pp": 2, "pp_schedule__name": "zbv", "pp_schedule__stages_per_rank": 2}
CSV = {
    "parallelism__pp": 2,
    "pp_schedule__name": "csv",
    "pp_schedule__csv": str(CONF / "pp_schedule" / "zb_h1.csv"),
    "data__local_batch": 8,
}
FLOAT8 = {"precision__converter": "float8", "precision__recipe": "rowwise"}
TENSORWISE = {"precision__converter": "float8", "precision__recipe": "tensorwise", "precision__float8_all_gather": True}
CUDNN = {"model__attention": "cudnn", "precision__compute_dtype": "bfloat16"}
ON_SLURM = {"cluster__executor": "slurm", "cluster__gpus_per_node": 8}
BAD = [  # changed values, the key that is named, a part of the message
    ({"gpus": -4, "parallelism__dp_shard": -1}, "gpus", "must be from 1 to 1,000,000"),
    ({"name": "../../evil"}, "name", "must be a name of letters"),
    ({"optimizer__lr": float("inf")}, "optimizer.lr", "must be a finite number"),
    ({"steps": 0}, "steps", "at least 1"),
    ({"optimizer__lr": -1.0}, "optimizer.lr", "nearest legal: 0"),
    ({"optimizer__beta2": 1.5}, "optimizer.beta2", "must be at least 0 and less than 1"),
    ({"optimizer__name": "adam"}, "optimizer.name", "adamw or muon"),
    ({"metrics__trackers": ["mlflow"]}, "metrics.trackers", "mlflow"),
    ({"cluster__gpus_per_node": 0}, "cluster.gpus_per_node", "from 1 to 1,024"),
    ({"cluster__stop_seconds": 0}, "cluster.stop_seconds", "at least 1"),
    ({"cluster__time_minutes": -5}, "cluster.time_minutes", "at least 1"),
    ({**ON_SLURM, "cluster__max_requeues": -1}, "cluster.max_requeues", "nearest legal: 0"),
    ({"cluster__executor": "slurm"}, "cluster.gpus_per_node", "needs it"),
    ({**ON_SLURM, "cluster__environment": {"NCCL-DEBUG": "INFO"}}, "cluster.environment", "NCCL-DEBUG"),
    ({**ON_SLURM, "cluster__sbatch": {"--mail-user": "me@site"}}, "cluster.sbatch", "without dashes before it"),
    ({**ON_SLURM, "cluster__sbatch": {"ntasks_per_node": 4}}, "cluster.sbatch", "follows from the layout"),
    ({**ON_SLURM, "cluster__srun": ["--label", "container.sqsh"]}, "cluster.srun", "write --flag=value"),
    ({**ON_SLURM, "cluster__srun": ["--ntasks=4"]}, "cluster.srun", "from the layout"),
    ({**ON_SLURM, "cluster__partition": "gpu long"}, "cluster.partition", "must be a word without blanks"),
    ({**ON_SLURM, "cluster__exclude": ["node1 node2"]}, "cluster.exclude", "node1 node2"),
    ({**ON_SLURM, "cluster__comment": "a\nscancel -u me"}, "cluster.comment", r"a\nscancel -u me: must not hold control characters"),
    ({**ON_SLURM, "cluster__sbatch": {"mail-user": "me\n"}}, "cluster.sbatch", "control character"),
    ({**ON_SLURM, "cluster__sbatch": {"mail\nuser": "me"}}, "cluster.sbatch", "control character"),
    ({**ON_SLURM, "cluster__environment": {"A": "\x1b[31m"}}, "cluster.environment", "control character"),
    ({**ON_SLURM, "cluster__setup": ["module load cuda", "a\rb"]}, "cluster.setup", "control character"),
    ({**ON_SLURM, "cluster__srun": ["--label\n"]}, "cluster.srun", "control character"),
    ({**ON_SLURM, "cluster__python": "python\n"}, "cluster.python", "control character"),
    ({**ON_SLURM, "cluster__exclude": ["node\x001"]}, "cluster.exclude", "control character"),
    ({**ON_SLURM, "cluster__comment": "a\\b"}, "cluster.comment", "sbatch drops the backslash"),
    ({"paths__runs": "a\tb"}, "paths.runs", r"a\tb: must not hold control characters"),
    ({"paths__runs": "a\udcffb"}, "paths.runs", "must not hold control characters"),
    ({**ON_SLURM, "paths__runs": "a\\b"}, "paths.runs", "sbatch drops the backslash"),
    ({**ON_SLURM, "cluster__time_minutes": 1}, "cluster.time_minutes", "nearest legal: 4"),
    ({**ON_SLURM, "cluster__time_minutes": 2, "cluster__stop_seconds": 30}, "cluster.time_minutes", "nearest legal: 3"),
    ({"parallelism__ep": 2}, "parallelism.ep", "nearest legal: 1"),
    ({"gpus": 3, "parallelism__dp_replicate": 2}, "gpus", "nearest legal: 2 or 4"),
    ({"gpus": 4, "parallelism__dp_shard": 2}, "gpus", "nearest legal: 2"),
    ({"parallelism__dp_shard": 0}, "parallelism.dp_shard", "from 1 to 1,000,000, or -1"),
    ({"gpus": 4, "parallelism__dp_replicate": -1}, "parallelism.dp_replicate", "only one degree"),
    ({"gpus": 3, "parallelism__tp": 3}, "parallelism.tp", "nearest legal: 2 or 4"),
    ({"gpus": 4, "parallelism__tp": 4, "model__multiple_of": 1}, "model.ffn_dim", "nearest legal: 680 or 684"),
    ({"model__head_dim": 15}, "model.head_dim", "nearest legal: 14 or 16"),
    ({"model__n_kv_heads": 3}, "model.n_kv_heads", "nearest legal: 2 or 4"),
    ({"model__n_heads": 3, "model__n_kv_heads": 3}, "model.n_heads", "nearest legal: 2 or 4"),
    ({"data__seq_len": 250, "parallelism__cp": 2}, "data.seq_len", "nearest legal: 248 or 252"),
    ({"data__seq_len": 252, "parallelism__cp": 2, "parallelism__tp": 4}, "data.seq_len", "nearest legal: 248 or 256"),
    ({"data__seq_len": 251, "parallelism__cp": 2, "parallelism__cp_load_balance": False}, "data.seq_len", "nearest legal: 250 or 252"),
    ({"data__seq_len": 251, "parallelism__cp": 2, "parallelism__cp_rotate": "ulysses"}, "data.seq_len", "nearest legal: 250 or 252"),
    ({"parallelism__cp": 3, "parallelism__cp_rotate": "ulysses", "data__seq_len": 252}, "parallelism.cp", "nearest legal: 2 or 4"),
    ({"parallelism__cp": 2, "data__document_mask": True}, "data.document_mask", "ulysses can"),
    ({"parallelism__cp": 2, "model__attention": "math"}, "model.attention", "147793); nearest legal: auto or flash"),
    ({**CUDNN, "parallelism__cp": 2}, "model.attention", "176915); nearest legal: auto or flash or efficient"),
    ({**CUDNN, "debug__deterministic": True}, "model.attention", "debug.deterministic=true"),
    ({**CUDNN, "data__document_mask": True}, "model.attention", "196678); nearest legal: auto or flash or efficient or math"),
    ({**CUDNN, "precision__compute_dtype": "float32"}, "model.attention", "float32; nearest legal: auto or flash"),
    ({"parallelism__cp": 2, "ac__name": "memory_budget", "compile__name": "block"}, "ac.name", "op or lean"),
    ({"data__seq_len": 255, "parallelism__tp": 2}, "data.seq_len", "nearest legal: 254 or 256"),
    ({"data__seq_len": 200000}, "data.seq_len", "131072"),
    ({"parallelism__pp": 8}, "parallelism.pp", "nearest legal: 6"),
    ({"parallelism__pp": 2, "pp_schedule__name": "zbv"}, "pp_schedule.stages_per_rank", "nearest legal: 2"),
    ({"parallelism__pp": 2, "pp_schedule__microbatches": 3}, "pp_schedule.microbatches", "nearest legal: 2 or 4"),
    ({"parallelism__pp": 4, "pp_schedule__microbatches": 2}, "pp_schedule.microbatches", "nearest legal: 4"),
    ({"parallelism__pp": 4, "data__local_batch": 2}, "data.local_batch", "nearest legal: 4"),
    (
        {**ZBV, "pp_schedule__name": "interleaved_zb", "data__local_batch": 5, "pp_schedule__microbatches": 5},
        "pp_schedule.microbatches",
        "2 equal rounds",
    ),
    ({**ZBV, "pp_schedule__name": "dualpipe_v", "pp_schedule__microbatches": 2}, "pp_schedule.microbatches", "nearest legal: 4"),
    ({"parallelism__pp": 2, "pp_schedule__layers_per_stage": 2}, "pp_schedule.layers_per_stage", "nearest legal: 3"),
    (
        {"parallelism__pp": 2, "pp_schedule__layers_per_stage": 3, "pp_schedule__split": ["layers.1"]},
        "pp_schedule.layers_per_stage",
        "null",
    ),
    ({"parallelism__pp": 2, "pp_schedule__split": ["layers.9"]}, "pp_schedule.split", "layers.5"),
    ({"parallelism__pp": 2, "pp_schedule__split": ["layers.1", "norm"]}, "pp_schedule.split", "take 1 name,"),
    ({"parallelism__pp": 3, "pp_schedule__split": ["norm", "layers.1"]}, "pp_schedule.split", "in the order"),
    ({"parallelism__pp": 2, "pp_schedule__name": "csv"}, "pp_schedule.csv", "needs a file"),
    ({"parallelism__pp": 2, "pp_schedule__name": "csv", "pp_schedule__csv": "/nowhere.csv"}, "pp_schedule.csv", "no such file"),
    ({**CSV, "pp_schedule__microbatches": 4}, "pp_schedule.microbatches", "nearest legal: 8"),
    ({**CSV, "parallelism__reshard_after_forward": "always"}, "parallelism.reshard_after_forward", "never"),
    ({"parallelism__pp": 2, "model__tie_embeddings": True}, "model.tie_embeddings", "different pipeline stages"),
    ({"gpus": 2, "data__local_batch": 8, "data__global_batch": 40}, "data.global_batch", "nearest legal: 32 or 48"),
    ({"gpus": 2, "data__local_batch": 8, "data__global_batch": 40}, "data.global_batch", "; it is one with data.local_batch=5;"),
    ({**FLOAT8, "model__dim": 264, "model__n_heads": 12, "model__n_kv_heads": 12}, "model.dim", "256 or 272"),
    ({"precision__converter": "mxfp8", "model__dim": 272, "model__n_heads": 8, "model__n_kv_heads": 8}, "model.dim", "256 or 288"),
    ({**FLOAT8, "data__seq_len": 100, "data__local_batch": 1}, "data.seq_len", "multiples of 16; nearest legal: 96 or 112"),
    ({"precision__emulate": True}, "precision.emulate", "nearest legal: false"),
    ({**FLOAT8, "precision__float8_all_gather": True}, "precision.float8_all_gather", "only tensorwise"),
    ({**TENSORWISE, "parallelism__backend": "simple_fsdp"}, "precision.float8_all_gather", "nearest legal: false"),
    ({**TENSORWISE, **ON_SLURM, "gpus": 512}, "precision.float8_all_gather", "512 ranks share 256 rows of wq"),
    (
        {**TENSORWISE, **ON_SLURM, "gpus": 96},
        "precision.float8_all_gather",
        "nearest legal: false",
    ),  # 3 rows each, none on the last 10
    ({**FLOAT8, "precision__emulate": True, "compile__name": "block"}, "precision.emulate", "nearest legal: false"),
    ({**FLOAT8, "precision__kernels": "fused", "debug__nan_hunt": True}, "precision.kernels", "blocks; nearest legal: torchao"),
    ({**TENSORWISE, "precision__kernels": "fused"}, "precision.kernels", "only for precision.recipe=rowwise; nearest legal: torchao"),
    ({**FLOAT8, "precision__kernels": "fused", "parallelism__tp": 2}, "precision.kernels", "whole rows, which parallelism.tp=2 splits"),
    ({**TENSORWISE, "parallelism__tp": 2, "precision__skip": ["output", "wk"]}, "precision.skip", "nearest legal: [output]"),
    ({"precision__converter": "mxfp8", "parallelism__tp": 2}, "parallelism.tp", "nearest legal: 1"),
    ({"loss__chunk_tokens": 0}, "loss.chunk_tokens", "at least 1"),
    ({"model__rope_scaling__low_freq_factor": 4.0}, "model.rope_scaling.low_freq_factor", "less than model.rope_scaling.high_freq_factor"),
    ({"model__ffn_dim_multiplier": 1e-9}, "model.ffn_dim_multiplier", "leaves no feed-forward"),
    ({"compile__name": "block", "compile__backend": "nosuch"}, "compile.backend", "inductor or eager"),
    ({"sweep__cell": "a"}, "sweep.cell", "belongs to no sweep"),
    ({"tokenizer__path": "t.json"}, "tokenizer.path", "tokenizer=embedded does not read it"),
    ({**ON_SLURM, "cluster__comment": "a\nb"}, "cluster.comment", "must not hold control characters"),
    ({**ON_SLURM, "cluster__sbatch": {"mem": "1\n#SBATCH --foo"}}, "cluster.sbatch", "control characters"),
    ({"gpus": 100_000}, "gpus", "100,000 processes, but this machine has"),
    ({"data__local_batch": 999_999_999}, "data.local_batch", "block inputs and logits take at least"),
    ({"data__global_batch": 2_000_000_000}, "data.global_batch", "tokens and labels of one step take at least"),
    ({"model__n_layers": 10_000, "model__dim": 16384}, "model.name", "parameters with gradients and the optimizer's moments take at least"),
    ({"cluster__executor": "slurm", "cluster__gpus_per_node": 8, "cluster__device_memory_gib": 0.01}, "data.local_batch", "has 0.01"),
    ({"optimizer__name": "muon", "precision__param_dtype": "bfloat16"}, "precision.param_dtype", "float32"),
    ({**ZBV, "parallelism__reshard_after_forward": "always"}, "parallelism.reshard_after_forward", "never"),
    ({**ZBV, "ac__name": "full"}, "ac.name", "recompute a block for each of its weights; nearest legal: none"),
    ({**ZBV, "compile__name": "block"}, "compile.name", "off"),
    ({"parallelism__tp": 2, "parallelism__async_tp": True}, "compile.name", "nearest legal: block"),
    ({"parallelism__async_tp": True, "compile__name": "block"}, "parallelism.async_tp", "nearest legal: false"),
    (
        {"parallelism__tp": 2, "parallelism__async_tp": True, "compile__name": "block", "parallelism__sequence_parallel": False},
        "parallelism.async_tp",
        "nothing to overlap",
    ),
    ({"ac__name": "memory_budget"}, "compile.name", "nearest legal: block"),
    *(
        ({"parallelism__tp": 2, "compile__name": "block", "ac__name": ac}, "ac.name", "op or lean or none")
        for ac in ("full", "layer", "memory_budget")
    ),
    ({"ac__name": "op", "ac__save_ops": ["mm"]}, "ac.save_ops", "mm is not an operator's name"),
    (
        {"parallelism__backend": "simple_fsdp", "parallelism__reshard_after_forward": "always"},
        "parallelism.reshard_after_forward",
        "default",
    ),
    ({"gpus": 2, "cluster__executor": "inline"}, "gpus", "inline"),
    ({"gpus": 4, "cluster__gpus_per_node": 2}, "gpus", "nearest legal: 2"),
    ({"data__name": "text_files"}, "data.path", "needs it"),
    ({"data__name": "text_files", "data__path": "/nowhere/*.txt"}, "data.path", "no such file"),
    ({"data__name": "text_files", "data__path": README, "validation__name": "on"}, "data.validation_path", "needs it"),
    ({"data__name": "text_files", "data__path": __file__}, "data.path", "ends in none of .txt, .md"),
    ({"data__name": "text_files", "data__path": "/"}, "data.path", "every file of this machine"),
    ({"model__vocab_size": 2048}, "model.vocab_size", "nearest legal: 4096"),
    ({"tokenizer__name": "tiktoken"}, "tokenizer.path", "needs it"),
    ({"tokenizer__name": "tiktoken", "tokenizer__path": "/nowhere/tokenizer.model"}, "tokenizer.path", "no such file"),
    ({"tokenizer__name": "tiktoken", "tokenizer__path": __file__}, "tokenizer.path", "cannot be read"),
    ({"tokenizer__name": "hf", "tokenizer__path": __file__}, "tokenizer.path", "cannot be read"),
    ({"checkpoint__initial_load_path": "/nowhere"}, "checkpoint.initial_load_path", "no such folder"),
    ({"checkpoint__initial_load_path": str(CONF)}, "checkpoint.initial_load_path", "no complete checkpoint"),
    ({"checkpoint__exclude_from_loading": ["adam"]}, "checkpoint.exclude_from_loading", "optimizer or data or lr_scheduler"),
    ({"checkpoint__interval_minutes": 0.0}, "checkpoint.interval_minutes", "more than 0"),
    ({"checkpoint__interval": 0, "checkpoint__last_step": False}, "checkpoint.interval", "nothing would be saved"),
    ({"checkpoint__name": "off", "checkpoint__export_dtype": "float32"}, "checkpoint.export_dtype", "writes nothing"),
]


@pytest.mark.parametrize(("values", "key", "text"), BAD, ids=lambda value: "-".join(value) if isinstance(value, dict) else None)
def test_a_bad_value_is_named_with_what_would_be_legal(base, monkeypatch, values, key, text):
    # torch 2.11 can compile what the rule of `ac.name` refuses
    monkeypatch.setattr(rules_of_compile, "versions", lambda: {"torch": "2.13.0"})
    faults = [fault for fault in check(changed(base, **values)) if fault.key == key]
    assert faults, check(changed(base, **values))
    assert any(text in str(fault) for fault in faults)


def test_a_fault_is_one_line_whatever_the_value_holds(base):
    for values, _, _ in BAD:
        for fault in check(changed(base, **values)):
            assert str(fault).isprintable(), str(fault)


def test_a_folder_that_a_job_cannot_name_is_refused_before_submission(base, tmp_path, monkeypatch):
    (tmp_path / "a\tb").mkdir()
    monkeypatch.chdir(tmp_path / "a\tb")
    assert check(changed(base)) == []
    assert [fault.key for fault in check(changed(base, **ON_SLURM))] == ["paths.runs"]


def test_settings_of_slurm_are_its_own(base):
    settings = {
        "partition": "gpu",
        "exclude": ["node[1-4]"],
        "sbatch": {"mem": 0, "gpus-per-node": None, "mail_user": "me@site"},
        "srun": ["--container-image=a.sqsh", "-l"],
        "environment": {"NCCL_DEBUG": "INFO"},
        "max_requeues": 0,
    }
    assert check(changed(base, **ON_SLURM, gpus=1, **{f"cluster__{key}": value for key, value in settings.items()})) == []
    for line in ("cluster=local", "cluster=inline"):
        with pytest.raises(ConfigError, match=r"^cluster.partition=gpu: cluster.executor=\w+ does not read it; slurm would$"):
            compose_job(line, "cluster.partition=gpu")


def test_a_tokenizer_smaller_than_the_embedding_is_fine(base):
    assert check(changed(base, model__vocab_size=8192)) == []


degree = st.sampled_from([-1, 0, 1, 2, 3, 4])


@settings(max_examples=60, deadline=None)
@given(
    gpus=st.integers(1, 16),
    dp_replicate=degree,
    dp_shard=degree,
    cp=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 3]),
)
def test_degrees_that_pass_build_their_mesh_and_others_would_not(base, gpus, dp_replicate, dp_shard, cp, tp, pp):
    job = changed(
        base,
        gpus=gpus,
        parallelism__dp_replicate=dp_replicate,
        parallelism__dp_shard=dp_shard,
        parallelism__cp=cp,
        parallelism__tp=tp,
        parallelism__pp=pp,
    )
    refused = list(values_are_what_the_schema_takes(job)) or list(degrees_fill_the_ranks(job))
    dist.init_process_group("fake", store=FakeStore(), rank=gpus - 1, world_size=gpus)
    try:
        if refused:
            with pytest.raises((RuntimeError, ValueError, AssertionError)):
                build_mesh(job.parallelism, "cpu")
        else:
            mesh = build_mesh(job.parallelism, "cpu")
            assert (mesh.world.size() if mesh.world else 1) == gpus
            assert mesh.data_rank == mesh.data_ranks - 1  # the last rank gets the last slots
    finally:
        dist.destroy_process_group()


@settings(max_examples=100, deadline=None)
@given(
    gpus=st.integers(1, 64),
    dp_replicate=st.sampled_from([1, 2]),
    tp=st.sampled_from([1, 2]),
    local=st.integers(1, 5),
    steps=st.integers(1, 4),
)
def test_what_freeze_derives_passes_the_checks(base, gpus, dp_replicate, tp, local, steps):
    gpus *= dp_replicate * tp
    job = changed(
        base,
        gpus=gpus,
        parallelism__dp_replicate=dp_replicate,
        parallelism__tp=tp,
        data__local_batch=local,
        data__global_batch=local * (gpus // tp) * steps,
    )
    assert [fault for rule in LAYOUT + RECIPE for fault in rule(job)] == []
    assert freeze(job) == job
