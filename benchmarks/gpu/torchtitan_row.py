"""Run one row with TorchTitan 0.2.2's own trainer and print what it measured as one JSON line: python -P torchtitan_row.py SETTINGS.

`torchtitan.train.Trainer` is unchanged: its Llama 3, parallelize_llama, compiled loss, optimizers, clipping, schedule and metrics. Ours
are the model's shape, a dataloader of random tokens, and a sink for its metrics. SETTINGS is run.py's row as JSON.

wrap=native is what it does with one rank: no FSDP, autocast to bf16. wrap=fsdp makes FSDP2 count at a shard degree of one too, as it runs
on several GPUs. Both figures belong beside ours.
"""
from __future__ import annotations

import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from torch.profiler import ProfilerActivity, profile, schedule

# What its data and logging modules import, and nothing uses that runs here. Large, and so carried nowhere.
UNUSED = {"datasets": ("datasets", "datasets.distributed"), "tokenizers": ("tokenizers",), "tensorboard": ("torch.utils.tensorboard",)}


def main(row: SimpleNamespace) -> None:
    for package, modules in UNUSED.items():
        if importlib.util.find_spec(package) is None:
            sys.modules.update({name: MagicMock() for name in modules})
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if row.cpu:
        use_cpu()
    import torchtitan.components.quantization.float8  # noqa: F401 - registers the converter
    from torchtitan.distributed.parallel_dims import ParallelDims
    from torchtitan.tools.logging import init_logger

    init_logger()
    if row.wrap == "fsdp":
        exists = ParallelDims._mesh_exist
        ParallelDims.dp_shard_enabled = property(lambda self: True)
        ParallelDims._mesh_exist = lambda self, name, degree: name == "fsdp" or exists(self, name, degree)
    windows: list[dict] = []
    register(row, windows)
    trainer = trainer_class(row)(configuration(row))
    block = trainer.model_parts[0].layers["0"]
    widths = block.moe.experts.w1.shape[:2] if row.experts else block.feed_forward.w1.weight.shape[:1]
    assert tuple(widths) == (tuple(row.experts[1::2]) if row.experts else (row.dimensions[4],))
    trainer.train()
    print(json.dumps({"windows": windows, "first_step_seconds": trainer.first_step_seconds,
                      "flops_per_token": trainer.metrics_processor.num_flops_per_token}), flush=True)


def configuration(row: SimpleNamespace):
    """TorchTitan's JobConfig for a row."""
    from torchtitan.config import JobConfig

    config = JobConfig()
    config.job.dump_folder = tempfile.mkdtemp()
    config.model.name, config.model.flavor = "row", "row"
    config.model.converters = ["quantize.linear.float8"] if row.precision != "bf16" else []
    float8 = config.quantize.linear.float8
    float8.filter_fqns, float8.emulate = ["output"], row.cpu
    if row.precision == "tensorwise":  # documented without a recipe's name
        float8.enable_fsdp_float8_all_gather = float8.precompute_float8_dynamic_scale_for_fsdp = row.float8_all_gather
    elif row.precision != "bf16":
        float8.recipe_name = row.precision
    config.training.local_batch_size, config.training.seq_len, config.training.steps = row.batch, row.seq_len, row.steps
    config.compile.enable = row.compile and not (row.cpu and row.precision != "bf16")
    config.compile.backend = "aot_eager" if row.cpu else "inductor"
    if row.ac in ("none", "full"):
        config.activation_checkpoint.mode = row.ac
    elif row.ac == "memory_budget":
        config.activation_checkpoint.mode, config.activation_checkpoint.memory_budget = "memory_budget", 0.5
    else:  # op, or layer: every second one
        config.activation_checkpoint.mode = "selective"
        config.activation_checkpoint.selective_ac_option = {"op": "op", "layer": "2"}[row.ac]
    config.metrics.log_freq, config.metrics.disable_color_printing = row.window, True
    config.debug.moe_force_load_balance = row.balanced
    config.lr_scheduler.warmup_steps, config.optimizer.lr, config.debug.seed = 2, 3e-4, 0
    return config


def register(row: SimpleNamespace, windows: list[dict]) -> None:
    """The row as a model of TorchTitan's registry."""
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.components.lr_scheduler import build_lr_schedulers
    from torchtitan.components.metrics import BaseLogger, MetricsProcessor
    from torchtitan.components.optimizer import build_optimizers
    from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

    vocabulary = row.dimensions[-1]

    class RandomTokens(BaseDataLoader):
        def __iter__(self):
            generator = torch.Generator().manual_seed(0)
            while True:
                tokens = torch.randint(0, vocabulary, (row.batch, row.seq_len + 1), generator=generator)
                yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

        def state_dict(self) -> dict:
            return {}

        def load_state_dict(self, state: dict) -> None:
            pass

    class Sink(BaseLogger):
        def log(self, metrics: dict, step: int) -> None:
            memory = {"active_gib": metrics["memory/max_active(GiB)"], "reserved_gib": metrics["memory/max_reserved(GiB)"]}
            windows.append({"step": step, "tokens_per_second": metrics["throughput(tps)"], "loss": metrics["loss_metrics/global_avg_loss"],
                            **(dict.fromkeys(memory) if row.cpu else memory)})

    def processor(config, dims, arguments=None, tag=None) -> MetricsProcessor:
        made = MetricsProcessor(config, dims, tag)
        made.logger = Sink()
        return made

    model, arguments, parallelize = model_of(row)
    register_train_spec("row", TrainSpec(
        model_cls=model, model_args={"row": arguments}, parallelize_fn=parallelize, pipelining_fn=None,
        build_optimizers_fn=build_optimizers, build_lr_schedulers_fn=build_lr_schedulers,
        build_dataloader_fn=lambda **_: RandomTokens(), build_tokenizer_fn=None, build_loss_fn=build_cross_entropy_loss,
        build_metrics_processor_fn=processor))


def model_of(row: SimpleNamespace) -> tuple:
    """The class of the row's model, its arguments, and what parallelizes it: Llama 3, or Qwen3 with experts."""
    dim, layers, heads, kv_heads, width, vocabulary = row.dimensions
    shape = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": kv_heads, "vocab_size": vocabulary}
    if row.experts:
        from torchtitan.models.moe import MoEArgs
        from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs, parallelize_qwen3

        head, experts, chosen, expert_width = row.experts
        routing = MoEArgs(num_experts=experts, num_shared_experts=0, top_k=chosen, score_func="softmax", route_norm=True,
                          score_before_experts=False, load_balance_coeff=None)
        arguments = Qwen3ModelArgs(**shape, head_dim=head, hidden_dim=width, qk_norm=True, moe_enabled=True,
                                   moe_inter_dim=expert_width, moe_args=routing)
        return Qwen3Model, arguments, parallelize_qwen3
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama

    multiplier = (width - 0.5) / int(2 * 4 * dim / 3)  # it derives the width; this ends at the one that is wanted
    return Transformer, TransformerModelArgs(**shape, multiple_of=256, rope_theta=500000, ffn_dim_multiplier=multiplier), parallelize_llama


def trainer_class(row: SimpleNamespace):
    """TorchTitan's trainer, which also times its first step and, where the row wants a trace, records its last two."""
    from torchtitan.train import Trainer

    class Timed(Trainer):
        first_step_seconds = None
        profiler = None

        def train_step(self, batches) -> None:
            if row.trace and self.step == row.steps - 2:
                activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (not row.cpu)]
                self.profiler = profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=2),
                                        on_trace_ready=lambda profiler: profiler.export_chrome_trace(row.trace))
                self.profiler.start()
            began = time.perf_counter()
            super().train_step(batches)
            if self.step == 1:
                torch.cuda.synchronize()
                self.first_step_seconds = time.perf_counter() - began
            if self.profiler is not None:
                self.profiler.step()
                if self.step == row.steps:
                    self.profiler.stop()

    return Timed


def use_cpu() -> None:
    """Let TorchTitan run on a CPU: its modules look the device up once, when they are imported."""
    import torchtitan.components.quantization.float8 as float8
    import torchtitan.train  # noqa: F401 - all that binds the device
    from torchao.float8 import Float8LinearConfig

    def nothing(*_, **__) -> None:
        pass

    module = SimpleNamespace(
        set_device=nothing, current_device=lambda: 0, get_device_name=lambda _: "cpu", reset_peak_memory_stats=nothing, empty_cache=nothing,
        get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 34), memory_stats=lambda _: {}, synchronize=nothing,
        manual_seed_all=nothing)
    torch.cuda.synchronize = torch.distributed.barrier = nothing  # with one rank there is nobody to wait for
    for name, found in list(sys.modules.items()):
        if name.startswith("torchtitan"):
            for attribute, value in (("device_module", module), ("device_type", "cpu")):
                if hasattr(found, attribute):
                    setattr(found, attribute, value)
    float8.has_cuda_capability = lambda *_: True
    recipe = Float8LinearConfig.from_recipe_name  # TorchTitan passes emulation on for tensorwise scaling alone
    Float8LinearConfig.from_recipe_name = staticmethod(lambda name: replace(recipe(name), emulate=True))


if __name__ == "__main__":
    status = 1
    try:
        main(SimpleNamespace(**json.loads(sys.argv[1])))
        status = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # without waiting for process groups and the compiler's workers
