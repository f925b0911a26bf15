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

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import from_dict
from titan_hydra.core.job.config.load import PICKED, picking, values_are_what_the_schema_takes
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules import compile as rules_of_compile
from titan_hydra.core.job.rules import pipeline as rules_of_pipeline
from titan_hydra.core.job.rules.checks import LAYOUT, RECIPE, check, degrees_fill_the_ranks
from titan_hydra.core.parallel import build_mesh
from titan_hydra.experiments.compose.compose import CONF, compose_job


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
# fmt: off
BAD = [  # changed values, the key and the rule that are named, the nearest legal choices ("": none, or this machine's)
    ({"gpus": -4, "parallelism__dp_shard": -1}, "gpus", "values_are_what_the_schema_takes", "1"),
    ({"name": "../../evil"}, "name", "values_are_what_the_schema_takes", ""),
    ({"optimizer__lr": float("inf")}, "optimizer.lr", "values_are_what_the_schema_takes", ""),
    ({"steps": 0}, "steps", "values_are_what_the_schema_takes", "1"),
    ({"optimizer__lr": -1.0}, "optimizer.lr", "values_are_what_the_schema_takes", "0"),
    ({"optimizer__beta2": 1.5}, "optimizer.beta2", "values_are_what_the_schema_takes", ""),
    ({"optimizer__name": "adam"}, "optimizer.name", "values_are_what_the_schema_takes", "adamw or muon or sgd"),
    ({"metrics__trackers": ["mlflow"]}, "metrics.trackers", "values_are_what_the_schema_takes", "tensorboard or wandb"),
    ({"cluster__gpus_per_node": 0}, "cluster.gpus_per_node", "values_are_what_the_schema_takes", "1"),
    ({"cluster__stop_seconds": 0}, "cluster.stop_seconds", "values_are_what_the_schema_takes", "1"),
    ({"cluster__time_minutes": -5}, "cluster.time_minutes", "values_are_what_the_schema_takes", "1"),
    ({**ON_SLURM, "cluster__max_requeues": -1}, "cluster.max_requeues", "values_are_what_the_schema_takes", "0"),
    ({"cluster__executor": "slurm"}, "cluster.gpus_per_node", "nodes_can_be_counted", ""),
    ({**ON_SLURM, "cluster__environment": {"NCCL-DEBUG": "INFO"}}, "cluster.environment", "executor_takes_its_keys", ""),
    ({**ON_SLURM, "cluster__sbatch": {"--mail-user": "me@site"}}, "cluster.sbatch", "executor_takes_its_keys", ""),
    ({**ON_SLURM, "cluster__sbatch": {"ntasks_per_node": 4}}, "cluster.sbatch", "executor_takes_its_keys", ""),
    ({**ON_SLURM, "cluster__srun": ["--label", "container.sqsh"]}, "cluster.srun", "executor_takes_its_keys", ""),
    ({**ON_SLURM, "cluster__srun": ["--ntasks=4"]}, "cluster.srun", "executor_takes_its_keys", ""),
    ({**ON_SLURM, "cluster__partition": "gpu long"}, "cluster.partition", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__exclude": ["node1 node2"]}, "cluster.exclude", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__comment": "a\nscancel -u me"}, "cluster.comment", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__sbatch": {"test-only": True}}, "cluster.sbatch", "executor_takes_its_keys", ""),
    ({**ON_SLURM, "cluster__sbatch": {"chdir": "/tmp"}}, "cluster.sbatch", "executor_takes_its_keys", ""),
    ({**ON_SLURM, "cluster__sbatch": {"wait": ""}}, "cluster.sbatch", "executor_takes_its_keys", ""),
    ({**ON_SLURM, "cluster__sbatch": {"mail-user": "me\n"}}, "cluster.sbatch", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__sbatch": {"mail\nuser": "me"}}, "cluster.sbatch", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__environment": {"A": "\x1b[31m"}}, "cluster.environment", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__setup": ["module load cuda", "a\rb"]}, "cluster.setup", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__srun": ["--label\n"]}, "cluster.srun", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__python": "python\n"}, "cluster.python", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__exclude": ["node\x001"]}, "cluster.exclude", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__comment": "a\\b"}, "cluster.comment", "executor_takes_its_keys", ""),
    ({"paths__runs": "a\tb"}, "paths.runs", "values_are_what_the_schema_takes", ""),
    ({"paths__runs": "a\udcffb"}, "paths.runs", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "paths__runs": "a\\b"}, "paths.runs", "executor_takes_its_keys", ""),
    ({**ON_SLURM, "cluster__time_minutes": 1}, "cluster.time_minutes", "executor_takes_its_keys", "4"),
    ({**ON_SLURM, "cluster__time_minutes": 2, "cluster__stop_seconds": 30}, "cluster.time_minutes", "executor_takes_its_keys", "3"),
    ({"parallelism__ep": 2}, "parallelism.ep", "dense_models_have_no_expert_ranks", "1"),
    ({"gpus": 3, "parallelism__dp_replicate": 2}, "gpus", "degrees_fill_the_ranks", "2 or 4"),
    ({"gpus": 4, "parallelism__dp_shard": 2}, "gpus", "degrees_fill_the_ranks", "2"),
    ({"parallelism__dp_shard": 0}, "parallelism.dp_shard", "values_are_what_the_schema_takes", "1"),
    ({"gpus": 4, "parallelism__dp_replicate": -1}, "parallelism.dp_replicate", "degrees_fill_the_ranks", ""),
    ({"gpus": 3, "parallelism__tp": 3}, "parallelism.tp", "heads_divide_over_tensor_ranks", "2 or 4"),
    ({"gpus": 4, "parallelism__tp": 4, "model__multiple_of": 1}, "model.ffn_dim", "feed_forward_divides_over_tensor_ranks", "680 or 684"),
    ({"model__head_dim": 15}, "model.head_dim", "heads_share_key_value_heads_evenly", "14 or 16"),
    ({"model__n_kv_heads": 3}, "model.n_kv_heads", "heads_share_key_value_heads_evenly", "2 or 4"),
    ({"model__n_heads": 3, "model__n_kv_heads": 3}, "model.n_heads", "heads_share_key_value_heads_evenly", "2 or 4"),
    ({"data__seq_len": 250, "parallelism__cp": 2}, "data.seq_len", "sequence_divides_over_its_ranks", "248 or 252"),
    ({"data__seq_len": 252, "parallelism__cp": 2, "parallelism__tp": 4}, "data.seq_len", "sequence_divides_over_its_ranks", "248 or 256"),
    (
        {"data__seq_len": 251, "parallelism__cp": 2, "parallelism__cp_load_balance": False},
        "data.seq_len",
        "sequence_divides_over_its_ranks",
        "250 or 252",
    ),
    (
        {"data__seq_len": 251, "parallelism__cp": 2, "parallelism__cp_rotate": "ulysses"},
        "data.seq_len",
        "sequence_divides_over_its_ranks",
        "250 or 252",
    ),
    (
        {"parallelism__cp": 3, "parallelism__cp_rotate": "ulysses", "data__seq_len": 252},
        "parallelism.cp",
        "heads_divide_over_ulysses_ranks",
        "2 or 4",
    ),
    ({"parallelism__cp": 2, "data__document_mask": True}, "data.document_mask", "ring_attention_is_causal_and_fused", "false"),
    (
        {"parallelism__cp": 2, "model__attention": "math"},
        "model.attention",
        "attention_kernel_computes_the_job",
        "auto or flash",
    ),
    ({**CUDNN, "parallelism__cp": 2}, "model.attention", "attention_kernel_computes_the_job", "auto or flash"),
    ({**CUDNN, "debug__deterministic": True}, "model.attention", "attention_kernel_computes_the_job", "auto or flash or efficient or math"),
    ({**CUDNN, "data__document_mask": True}, "model.attention", "attention_kernel_computes_the_job", "auto or flash or efficient or math"),
    (
        {**CUDNN, "precision__compute_dtype": "float32"},
        "model.attention",
        "attention_kernel_computes_the_job",
        "auto or flash or efficient or math",
    ),
    (
        {"parallelism__cp": 2, "ac__name": "memory_budget", "compile__name": "block"},
        "ac.name",
        "ring_attention_is_causal_and_fused",
        "op or lean",
    ),
    ({"data__seq_len": 255, "parallelism__tp": 2}, "data.seq_len", "sequence_divides_over_its_ranks", "254 or 256"),
    ({"data__seq_len": 200000}, "data.seq_len", "sequence_divides_over_its_ranks", "131072"),
    ({"parallelism__pp": 8}, "parallelism.pp", "pipeline_is_laid_out", "6"),
    ({"parallelism__pp": 2, "pp_schedule__name": "zbv"}, "pp_schedule.stages_per_rank", "pipeline_is_laid_out", "2"),
    ({"parallelism__pp": 2, "pp_schedule__microbatches": 3}, "pp_schedule.microbatches", "pipeline_is_laid_out", "2 or 4"),
    ({"parallelism__pp": 4, "pp_schedule__microbatches": 2}, "pp_schedule.microbatches", "pipeline_is_laid_out", "4"),
    ({"parallelism__pp": 4, "data__local_batch": 2}, "data.local_batch", "pipeline_is_laid_out", "4"),
    (
        {**ZBV, "pp_schedule__name": "interleaved_zb", "data__local_batch": 5, "pp_schedule__microbatches": 5},
        "pp_schedule.microbatches",
        "pipeline_is_laid_out",
        "1",
    ),
    ({**ZBV, "pp_schedule__name": "dualpipe_v", "pp_schedule__microbatches": 2}, "pp_schedule.microbatches", "pipeline_is_laid_out", "4"),
    ({"parallelism__pp": 2, "pp_schedule__layers_per_stage": 2}, "pp_schedule.layers_per_stage", "pipeline_is_laid_out", "3"),
    (
        {"parallelism__pp": 2, "pp_schedule__layers_per_stage": 3, "pp_schedule__split": ["layers.1"]},
        "pp_schedule.layers_per_stage",
        "pipeline_is_laid_out",
        "null",
    ),
    ({"parallelism__pp": 2, "pp_schedule__split": ["layers.9"]}, "pp_schedule.split", "pipeline_is_laid_out", ""),
    ({"parallelism__pp": 2, "pp_schedule__split": ["layers.1", "norm"]}, "pp_schedule.split", "pipeline_is_laid_out", ""),
    ({"parallelism__pp": 3, "pp_schedule__split": ["norm", "layers.1"]}, "pp_schedule.split", "pipeline_is_laid_out", ""),
    ({"parallelism__pp": 2, "pp_schedule__name": "csv"}, "pp_schedule.csv", "pipeline_is_laid_out", ""),
    ({"parallelism__pp": 2, "pp_schedule__name": "csv", "pp_schedule__csv": "/nowhere.csv"}, "pp_schedule.csv", "pipeline_is_laid_out", ""),
    ({**CSV, "pp_schedule__microbatches": 4}, "pp_schedule.microbatches", "pipeline_is_laid_out", "8"),
    (
        {**CSV, "parallelism__reshard_after_forward": "always"},
        "parallelism.reshard_after_forward",
        "zero_bubble_schedules_keep_parameters_gathered",
        "never",
    ),
    ({"parallelism__pp": 2, "model__tie_embeddings": True}, "model.tie_embeddings", "pipeline_is_laid_out", "false"),
    ({"gpus": 2, "data__local_batch": 8, "data__global_batch": 40}, "data.global_batch", "global_batch_is_whole_local_batches", "32 or 48"),
    ({"gpus": 2, "data__local_batch": 8, "data__global_batch": 40}, "data.global_batch", "global_batch_is_whole_local_batches", "32 or 48"),
    ({**FLOAT8, "model__dim": 264, "model__n_heads": 12, "model__n_kv_heads": 12}, "model.dim", "widths_suit_the_format", "256 or 272"),
    (
        {"precision__converter": "mxfp8", "model__dim": 272, "model__n_heads": 8, "model__n_kv_heads": 8},
        "model.dim",
        "widths_suit_the_format",
        "256 or 288",
    ),
    ({**FLOAT8, "data__seq_len": 100, "data__local_batch": 1}, "data.seq_len", "tokens_suit_the_format", "96 or 112"),
    ({"precision__emulate": True}, "precision.emulate", "format_suits_the_job", "false"),
    ({**FLOAT8, "precision__float8_all_gather": True}, "precision.float8_all_gather", "format_suits_the_job", "false"),
    ({**TENSORWISE, "parallelism__backend": "simple_fsdp"}, "precision.float8_all_gather", "format_suits_the_job", "false"),
    ({**TENSORWISE, **ON_SLURM, "gpus": 512}, "precision.float8_all_gather", "format_suits_the_job", "false"),
    # 3 rows each, none on the last 10
    (
        {**TENSORWISE, **ON_SLURM, "gpus": 96},
        "precision.float8_all_gather",
        "format_suits_the_job",
        "false",
    ),
    ({**FLOAT8, "precision__emulate": True, "compile__name": "block"}, "precision.emulate", "emulation_is_eager", "false"),
    ({**FLOAT8, "precision__kernels": "fused", "debug__nan_hunt": True}, "precision.kernels", "format_suits_the_job", "torchao"),
    ({**TENSORWISE, "precision__kernels": "fused"}, "precision.kernels", "format_suits_the_job", "torchao"),
    ({**FLOAT8, "precision__kernels": "fused", "parallelism__tp": 2}, "precision.kernels", "format_suits_the_job", "torchao"),
    (
        {**TENSORWISE, "parallelism__tp": 2, "precision__skip": ["output", "wk"]},
        "precision.skip",
        "tensor_parallel_takes_the_format",
        "[output]",
    ),
    ({"precision__converter": "mxfp8", "parallelism__tp": 2}, "parallelism.tp", "tensor_parallel_takes_the_format", "1"),
    ({"precision__converter": "mxfp8", "precision__converts": "both"}, "precision.converts", "format_suits_the_job", "linears"),
    ({"loss__chunk_tokens": 0}, "loss.chunk_tokens", "values_are_what_the_schema_takes", "1"),
    ({"model__rope_scaling__low_freq_factor": 4.0}, "model.rope_scaling.low_freq_factor", "family_takes_its_own_keys", ""),
    ({"model__ffn_dim_multiplier": 1e-9}, "model.ffn_dim_multiplier", "family_takes_its_own_keys", ""),
    ({"compile__name": "block", "compile__backend": "nosuch"}, "compile.backend", "compiler_is_one_that_torch_knows", ""),
    ({"sweep__cell": "a"}, "sweep.cell", "cells_belong_to_a_sweep", ""),
    ({"tokenizer__path": "t.json"}, "tokenizer.path", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__comment": "a\nb"}, "cluster.comment", "values_are_what_the_schema_takes", ""),
    ({**ON_SLURM, "cluster__sbatch": {"mem": "1\n#SBATCH --foo"}}, "cluster.sbatch", "values_are_what_the_schema_takes", ""),
    ({"gpus": 100_000}, "gpus", "ranks_fit_the_memory", ""),
    ({"data__local_batch": 999_999_999}, "data.local_batch", "ranks_fit_the_memory", ""),
    ({"data__global_batch": 2_000_000_000}, "data.global_batch", "ranks_fit_the_memory", ""),
    ({"model__n_layers": 10_000, "model__dim": 16384}, "model.name", "ranks_fit_the_memory", ""),
    (
        {"cluster__executor": "slurm", "cluster__gpus_per_node": 8, "cluster__device_memory_gib": 0.01},
        "data.local_batch",
        "ranks_fit_the_memory",
        "",
    ),
    (
        {"optimizer__name": "muon", "precision__param_dtype": "bfloat16"},
        "precision.param_dtype",
        "optimizer_has_the_parameters_it_needs",
        "float32",
    ),
    (
        {**ZBV, "parallelism__reshard_after_forward": "always"},
        "parallelism.reshard_after_forward",
        "zero_bubble_schedules_keep_parameters_gathered",
        "never",
    ),
    ({**ZBV, "ac__name": "full"}, "ac.name", "zero_bubble_schedules_keep_parameters_gathered", "none"),
    ({**ZBV, "compile__name": "block"}, "compile.name", "zero_bubble_schedules_keep_parameters_gathered", "off"),
    ({"parallelism__tp": 2, "parallelism__async_tp": True}, "compile.name", "async_tensor_parallel_is_the_compilers", "block"),
    ({"parallelism__async_tp": True, "compile__name": "block"}, "parallelism.async_tp", "async_tensor_parallel_is_the_compilers", "false"),
    (
        {"parallelism__tp": 2, "parallelism__async_tp": True, "compile__name": "block", "parallelism__sequence_parallel": False},
        "parallelism.async_tp",
        "async_tensor_parallel_is_the_compilers",
        "false",
    ),
    (
        {"optimizer__offload": True, "fault_tolerance__name": "torchft", "fault_tolerance__replicas": 2},
        "optimizer.offload",
        "states_can_be_offloaded",
        "false",
    ),
    ({"ac__name": "memory_budget"}, "compile.name", "memory_budget_is_the_compilers", "block"),
    (
        {"ac__name": "offload", "compile__name": "model"},
        "compile.name",
        "inputs_in_the_hosts_memory_are_those_of_a_block",
        "block",
    ),
    (
        {"gpus": 4, "parallelism__cp": 4, "parallelism__cp_rotate": "alltoall", "compile__name": "block"},
        "parallelism.cp_rotate",
        "a_compiled_ring_has_two_ranks",
        "allgather or ulysses",
    ),
    *(
        (
            {"parallelism__tp": 2, "compile__name": "block", "ac__name": ac},
            "ac.name",
            "compiled_tensor_parallel_blocks_save_tensors",
            "op or lean or none",
        )
        for ac in ("full", "layer", "memory_budget")
    ),
    ({"ac__name": "op", "ac__save_ops": ["mm"]}, "ac.save_ops", "saved_operators_are_names", "aten.mm or aten.max.default"),
    (
        {"parallelism__backend": "simple_fsdp", "parallelism__reshard_after_forward": "always"},
        "parallelism.reshard_after_forward",
        "simple_fsdp_has_no_resharding",
        "default",
    ),
    ({"gpus": 2, "cluster__executor": "inline"}, "gpus", "ranks_fit_the_cluster", "1"),
    ({"gpus": 4, "cluster__gpus_per_node": 2}, "gpus", "ranks_fit_the_cluster", "2"),
    ({"data__name": "text_files"}, "data.path", "data_files_are_there", ""),
    ({"data__name": "text_files", "data__path": "/nowhere/*.txt"}, "data.path", "data_files_are_there", ""),
    ({"data__name": "text_files", "data__path": README, "validation__name": "on"}, "data.validation_path", "data_files_are_there", ""),
    ({"data__name": "text_files", "data__path": __file__}, "data.path", "data_files_are_there", ""),
    ({"data__name": "text_files", "data__path": "/"}, "data.path", "data_files_are_there", ""),
    ({"model__vocab_size": 2048}, "model.vocab_size", "tokenizer_fits_the_vocabulary", "4096"),
    ({"tokenizer__name": "tiktoken"}, "tokenizer.path", "tokenizer_fits_the_vocabulary", ""),
    ({"tokenizer__name": "tiktoken", "tokenizer__path": "/nowhere/tokenizer.model"}, "tokenizer.path", "tokenizer_fits_the_vocabulary", ""),
    ({"tokenizer__name": "tiktoken", "tokenizer__path": __file__}, "tokenizer.path", "tokenizer_fits_the_vocabulary", ""),
    ({"tokenizer__name": "hf", "tokenizer__path": __file__}, "tokenizer.path", "tokenizer_fits_the_vocabulary", ""),
    ({"checkpoint__initial_load_path": "/nowhere"}, "checkpoint.initial_load_path", "initial_weights_are_there", ""),
    ({"checkpoint__initial_load_path": str(CONF)}, "checkpoint.initial_load_path", "initial_weights_are_there", ""),
    (
        {"checkpoint__exclude_from_loading": ["adam"]},
        "checkpoint.exclude_from_loading",
        "values_are_what_the_schema_takes",
        "optimizer or data or lr_scheduler",
    ),
    ({"checkpoint__interval_minutes": 0.0}, "checkpoint.interval_minutes", "values_are_what_the_schema_takes", ""),
    ({"checkpoint__interval": 0, "checkpoint__last_step": False}, "checkpoint.interval", "checkpoints_are_due_at_times_that_come", "100"),
    (
        {"checkpoint__name": "off", "checkpoint__export_dtype": "float32"},
        "checkpoint.export_dtype",
        "checkpoints_are_due_at_times_that_come",
        "null",
    ),
]
# fmt: on


@pytest.mark.parametrize(
    ("values", "key", "code", "choices"), BAD, ids=lambda value: "-".join(value) if isinstance(value, dict) else None
)
def test_a_bad_value_is_named_with_what_would_be_legal(base, monkeypatch, values, key, code, choices):
    # a rule of `ac.name` does not apply to torch 2.11
    monkeypatch.setattr(rules_of_compile, "versions", lambda: {"torch": "2.13.0"})
    faults = check(changed(base, **values))
    assert any(
        (fault.key, fault.code) == (key, code) and choices in ("", " or ".join(fault.choices)) for fault in faults
    ), faults


@pytest.mark.parametrize("torch", ["2.11.0", "2.13.0"])
def test_torch_that_frees_the_graph_splits_only_plain_backwards(monkeypatch, torch):
    monkeypatch.setattr(rules_of_pipeline, "versions", lambda: {"torch": torch})
    line = ("debug=tiny", "model.n_layers=4", "gpus=2", "parallelism=pp")
    fused = [compose_job(*line, f"pp_schedule={name}") for name in ("zbv", "interleaved_1f1b")]
    for job in fused:
        assert check(job) == []
        job.loss.name = "linear_cross_entropy"
    refused = [[fault.key for fault in check(job)] for job in fused]
    assert refused == [["pp_schedule.name"] if torch == "2.11.0" else [], []]


def test_a_fault_is_one_line_whatever_the_value_holds(base):
    for values, *_ in BAD:
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
    assert (
        check(changed(base, **ON_SLURM, gpus=1, **{f"cluster__{key}": value for key, value in settings.items()})) == []
    )
    for line in ("cluster=local", "cluster=inline"):
        with pytest.raises(
            ConfigError, match=r"^cluster.partition=gpu: cluster.executor=\w+ does not read it; slurm would$"
        ):
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
