"""What a user meant by a key, group or option that does not exist: names that are spelled alike, and names that other
programs use. A hint is a whole override wherever the typed value allows it.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from titan_hydra.core.job.config.fault import suggest
from titan_hydra.core.job.config.field import converted, value_faults
from titan_hydra.core.job.config.files import CONF, default_options
from titan_hydra.core.job.config.load import kind_of, known_keys

SYNONYMS = {  # names that other programs give to our keys and groups, or to whole overrides and lines of titan
    "data.local_batch": "batch_size local_batch_size micro_batch_size per_device_train_batch_size per_device_batch_size bs",
    "optimizer.lr": "learning_rate max_lr",
    "data.global_batch": "batch_size global_batch_size train_batch_size",
    "data.global_batch=N": "gradient_accumulation_steps gradient_accumulation grad_accum accumulate_grad_batches",
    "optimizer": "optim",
    "optimizer.weight_decay": "wd decay",
    "optimizer.max_norm": "clip grad_clip gradient_clip gradient_clip_val max_grad_norm clip_grad clip_grad_norm",
    "lr_scheduler.warmup_steps": "warmup num_warmup_steps warmup_iters lr_warmup_iters",
    "steps": "max_steps num_steps train_steps iterations iters max_iters train_iters total_steps",
    "steps=epoch": "epochs num_epochs max_epochs num_train_epochs",
    "steps=N": "epochs num_epochs max_epochs num_train_epochs tokens max_tokens num_tokens train_tokens total_tokens",
    "data.seq_len": "sequence_length seq_length block_size context_length max_length max_seq_length",
    "model.dim": "hidden_size hidden_dim d_model n_embd",
    "model.n_layers": "layers num_layers n_layer num_hidden_layers depth",
    "model.n_heads": "heads num_heads n_head num_attention_heads",
    "model.n_kv_heads": "num_key_value_heads kv_heads num_query_groups",
    "model.n_experts": "n_routed_experts num_experts num_local_experts",
    "model.experts_per_token": "num_experts_per_tok moe_router_topk top_k",
    "model.expert_dim": "moe_intermediate_size moe_ffn_hidden_size",
    "model.first_k_dense_replace": "first_k_dense_replace",
    "model.norm_topk_prob": "norm_topk_prob",
    "model.routed_scaling_factor": "routed_scaling_factor moe_router_topk_scaling_factor",
    "model.n_group": "n_group moe_router_num_groups",
    "model.topk_group": "topk_group moe_router_group_topk",
    "model.router_bias_update_rate": "router_bias_update_rate moe_router_bias_update_rate load_balance_coeff",
    "model.q_lora_rank": "q_lora_rank",
    "model.kv_lora_rank": "kv_lora_rank",
    "model.qk_nope_head_dim": "qk_nope_head_dim qk_head_dim",
    "model.qk_rope_head_dim": "qk_rope_head_dim qk_pos_emb_head_dim",
    "model.v_head_dim": "v_head_dim",
    "model": "model_name model_name_or_path flavor size",
    "gpus": "nproc world_size num_gpus n_gpus ngpus num_processes devices ranks",
    "gpus=N": "nodes nnodes num_nodes n_nodes",
    "cluster.gpus_per_node": "nproc_per_node gpus_per_node num_gpus_per_node n_gpus_per_node ntasks_per_node",
    "cluster": "executor launcher",
    "cluster=slurm": "slurm submitit",
    "cluster=kubernetes": "kubernetes k8s",
    "cluster.time_minutes": "time walltime time_limit timeout_min",
    "data": "dataset corpus",
    "data=text_files data.path": "dataset_path train_file data_path data_dir file files",
    "precision": "dtype torch_dtype param_dtype mixed_precision",
    "precision=bf16": "bf16 amp autocast mixed_precision fp16 half bfloat16",
    "precision=fp32": "fp32 float32",
    "precision=float8_rowwise": "fp8 float8 quantization",
    "paths.runs": "output_dir save_dir out_dir log_dir run_dir runs_dir dump_folder default_root_dir",
    "checkpoint.interval": "save_steps save_every save_interval every",
    "checkpoint.initial_load_path": "load load_from load_path resume_from init_from ckpt ckpt_path pretrained",
    "titan resume RUN": "resume auto_resume restart resume_from_checkpoint",
    "validation.interval": "eval_steps eval_every eval_interval val_interval every val_check_interval",
    "metrics.log_every": "logging_steps log_interval log_freq log_every_n_steps every",
    "metrics=wandb": "wandb use_wandb enable_wandb",
    "metrics=tensorboard": "tensorboard enable_tensorboard",
    "launch.mode=dry": "dry_run dryrun dry",
    "adapter=lora": "lora peft use_lora",
    "parametrization=mup": "mup mu_p use_mup",
    "parallelism.tp": "tensor_parallel tensor_parallel_size tensor_model_parallel_size tensor_parallel_degree tp_size",
    "parallelism.pp": "pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel_degree pp_size",
    "parallelism.cp": "context_parallel context_parallel_size context_parallel_degree cp_size",
    "parallelism.ep": "expert_parallel expert_parallel_size expert_model_parallel_size expert_parallel_degree ep_size",
    "parallelism.dp_shard": "data_parallel_shard_degree fsdp_size",
    "parallelism.dp_replicate": "data_parallel_replicate_degree",
    "pp_schedule": "schedule pipeline_schedule pipeline_parallel_schedule",
    "name": "run_name exp_name experiment_name",
    "ac": "activation_checkpoint activation_checkpointing gradient_checkpointing recompute recompute_granularity remat",
    "ac=full": "activation_checkpoint activation_checkpointing gradient_checkpointing recompute recompute_granularity remat",
    "parallelism": "strategy",
    "parallelism=fsdp": "fsdp fsdp2 zero",
    "parallelism=ddp": "ddp data_parallel",
    "compile=block": "compile torch_compile use_compile",
    "profiling=on": "profile profiler enable_profiling",
    "lr_scheduler": "schedule scheduler lr_schedule lr_scheduler_type lr_decay_style",
}


def meant_by(key: str, value: Any = None, typed: str = "") -> tuple[str, ...]:
    """Return the overrides that were probably meant by an unknown key. They have the value `typed`; if no value was typed,
    or it suits none of them, they are only names.
    """
    above, _, last = key.lower().replace("-", "_").rpartition(".")
    groups = default_options()
    names = [*(name for name in known_keys() if name.removesuffix(".name") not in groups), *groups]
    if dataclasses.is_dataclass(kind_of(above)):  # the key may be below a name that the user chose
        names += [f"{above}.{spec.name}" for spec in dataclasses.fields(kind_of(above))]
    meant = _of_peers(last)
    meant = [name for name in meant if name.startswith(f"{above}.")] or meant or _of_peers(above.partition(".")[0])
    meant = meant or [*(suggest(key, names) or suggest(key.lower(), names))]
    suited = [hint for name in meant if typed for hint in _with_value(name, value, typed)]
    return tuple(suited or [*filter(_is_whole, meant)] or meant)


def _of_peers(word: str) -> list[str]:
    return [name for name, synonyms in SYNONYMS.items() if word in synonyms.split()]


def _is_whole(hint: str) -> bool:
    return hint.startswith("titan ") or "=" in hint.rpartition(" ")[2]


def _with_value(name: str, value: Any, typed: str) -> list[str]:
    """Return a key or group as overrides with a value that it takes: the typed one, or options that are named alike."""
    last = name.rpartition(" ")[2]
    if last in default_options():
        options = sorted(file.stem for file in (CONF / last).glob("*.yaml"))
        return (
            [f"{last}={option}" for option in suggest_option(str(value), options)[:2]]
            if value not in options
            else [f"{name}={typed}"]
        )
    spec = known_keys().get(last)
    if _is_whole(name) or spec is None or last.removesuffix(".name") in default_options():
        return []
    try:
        value = converted(kind_of(last), value)
    except ValueError:
        return []
    return [] if any(value_faults(last, spec, value)) else [f"{name}={typed}"]


def suggest_option(word: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the options that a word may mean, even if the word is spelled differently, such as 8b or llama-3.1-8b."""
    parts = [part for part in re.split(r"[^a-z0-9]+", word.lower()) if part]
    return suggest(word, names) or tuple(name for name in names if parts and name.endswith(f"_{parts[-1]}"))[:3]
