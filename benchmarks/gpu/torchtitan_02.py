"""Adapt a row of torchtitan_row.py to TorchTitan 0.2.2: as a JobConfig, and as a model in TorchTitan's registry.

TorchTitan's Llama 3, parallelize_llama, compiled loss, optimizers, clipping, schedule and metrics are unchanged. We add
the model's shape, a dataloader of random tokens, and a sink for the metrics. wrap=native is TorchTitan's own behaviour
on one rank: no FSDP, autocast to bf16. wrap=fsdp uses FSDP2 at a shard degree of one too, as on several GPUs. Our
figures should be compared with those of both settings.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torchtitan.components.quantization.float8 as float8  # registers the converter
from torchtitan_row import NoState, random_tokens, window


def trainer_class() -> type:
    from torchtitan.train import Trainer

    return Trainer


def expert_shape(block: Any) -> tuple[int, ...]:
    return block.moe.experts.w1.shape[:2]


def emulate_float8() -> None:
    """Let Float8 run on a CPU. TorchTitan itself hands over the option for emulation only with tensorwise scaling."""
    import torchtitan.train  # noqa: F401 - all that binds the device
    from torchao.float8 import Float8LinearConfig

    float8.has_cuda_capability = lambda *_: True
    recipe = Float8LinearConfig.from_recipe_name
    Float8LinearConfig.from_recipe_name = staticmethod(lambda name: replace(recipe(name), emulate=True))


def configuration(row: SimpleNamespace, windows: list[dict]):
    """Return TorchTitan's JobConfig for a row; its measurements are appended to `windows`."""
    from torchtitan.config import JobConfig
    from torchtitan.distributed.parallel_dims import ParallelDims

    if row.wrap == "fsdp":
        exists = ParallelDims._mesh_exist
        ParallelDims.dp_shard_enabled = property(lambda self: True)
        ParallelDims._mesh_exist = lambda self, name, degree: name == "fsdp" or exists(self, name, degree)
    register(row, windows)
    config = JobConfig()
    config.job.dump_folder = tempfile.mkdtemp()
    config.model.name, config.model.flavor = "row", "row"
    float8_recipe = row.precision not in ("bf16", "fp32")
    config.model.converters = ["quantize.linear.float8"] if float8_recipe else []
    settings = config.quantize.linear.float8
    settings.filter_fqns, settings.emulate = ["output"], row.cpu
    if row.precision == "tensorwise":  # documented without the name of a recipe
        settings.enable_fsdp_float8_all_gather = settings.precompute_float8_dynamic_scale_for_fsdp = (
            row.float8_all_gather
        )
    elif float8_recipe:
        settings.recipe_name = row.precision
    config.training.local_batch_size, config.training.seq_len, config.training.steps = row.batch, row.seq_len, row.steps
    config.training.mixed_precision_param = "float32" if row.precision == "fp32" else "bfloat16"
    config.compile.enable = row.compile and not (row.cpu and float8_recipe)
    config.compile.backend = "aot_eager" if row.cpu else "inductor"
    if row.ac in ("none", "full"):
        config.activation_checkpoint.mode = row.ac
    elif row.ac == "memory_budget":
        config.activation_checkpoint.mode, config.activation_checkpoint.memory_budget = "memory_budget", 0.5
    else:  # op, or every second layer
        config.activation_checkpoint.mode = "selective"
        config.activation_checkpoint.selective_ac_option = {"op": "op", "layer": "2"}[row.ac]
    config.metrics.log_freq, config.metrics.disable_color_printing = row.window, True
    config.debug.moe_force_load_balance = row.balanced
    config.lr_scheduler.warmup_steps, config.optimizer.lr, config.debug.seed = 2, row.lr, 0
    return config


def register(row: SimpleNamespace, windows: list[dict]) -> None:
    """Register the row as a model in TorchTitan's registry."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.metrics import BaseLogger, MetricsProcessor
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

    class RandomTokens(NoState, BaseDataLoader):
        def __iter__(self):
            return (({"input": tokens}, targets) for tokens, targets in random_tokens(row))

    class Sink(BaseLogger):
        def log(self, metrics: dict, step: int) -> None:
            windows.append(window(row, step, metrics))

    def processor(config, dims, arguments=None, tag=None) -> MetricsProcessor:
        made = MetricsProcessor(config, dims, tag)
        made.logger = Sink()
        return made

    model, arguments, parallelize = model_of(row)
    register_train_spec(
        "row",
        TrainSpec(
            model_cls=model,
            model_args={"row": arguments},
            parallelize_fn=parallelize,
            pipelining_fn=None,
            build_optimizers_fn=build_optimizers,
            build_lr_schedulers_fn=build_lr_schedulers,
            build_dataloader_fn=lambda **_: RandomTokens(),
            build_tokenizer_fn=None,
            build_loss_fn=build_cross_entropy_loss,
            build_metrics_processor_fn=processor,
        ),
    )


def model_of(row: SimpleNamespace) -> tuple:
    """Return the class of the row's model, its arguments, and the function that parallelizes it: Llama 3, or Qwen3 with
    experts.
    """
    dim, layers, heads, kv_heads, width, vocabulary = row.dimensions
    shape = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": kv_heads, "vocab_size": vocabulary}
    if row.experts:
        from torchtitan.models.moe import MoEArgs
        from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, parallelize_qwen3

        head, experts, chosen, expert_width = row.experts
        routing = MoEArgs(
            num_experts=experts,
            num_shared_experts=0,
            top_k=chosen,
            score_func="softmax",
            route_norm=True,
            score_before_experts=False,
            load_balance_coeff=None,
        )
        arguments = Qwen3ModelArgs(
            **shape,
            head_dim=head,
            hidden_dim=width,
            qk_norm=True,
            moe_enabled=True,
            moe_inter_dim=expert_width,
            moe_args=routing,
        )
        return Qwen3Model, arguments, parallelize_qwen3
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama

    # TorchTitan derives the width from this; the result is the width we want
    multiplier = (width - 0.5) / int(2 * 4 * dim / 3)
    return (
        Transformer,
        TransformerModelArgs(**shape, multiple_of=256, rope_theta=500000, ffn_dim_multiplier=multiplier),
        parallelize_llama,
    )
