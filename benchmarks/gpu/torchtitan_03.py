"""Adapt a row of torchtitan_row.py to TorchTitan 0.3: as a Trainer.Config.

TorchTitan's Llama 3 and Qwen3, parallelize functions, chunked loss, optimizers, clipping, schedule and metrics are
unchanged. We add the model's shape, a dataloader of random tokens, a tokenizer that does nothing, and a sink for the
metrics. TorchTitan 0.3 wraps a model with FSDP2 on one rank too, so wrap=native and wrap=fsdp are one measurement. On
CUDA it runs like its own configurations, with FlexAttention and CUDA graphs. FlexAttention has no backward on a CPU, so
there the blocks use TorchTitan's own module around scaled_dot_product_attention.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from torchtitan_row import NoState, random_tokens, window


def trainer_class() -> type:
    from torchtitan.trainer import Trainer

    return Trainer


def expert_shape(block: Any) -> tuple[int, ...]:
    """Return the number of a block's experts and their width."""
    (shape,) = {tuple(weight.shape[:2]) for name, weight in block.moe.named_parameters() if name.endswith("w1_EFD")}
    return shape


def emulate_float8() -> None:
    """Import everything that reads the device at import. The Float8 converter gets emulation from its configuration."""
    import torchtitan.trainer  # noqa: F401


def configuration(row: SimpleNamespace, windows: list[dict]):
    """Return TorchTitan's Trainer.Config for a row; its measurements are appended to `windows`."""
    from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import CompileConfig, TrainingConfig
    from torchtitan.config.configs import DebugConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
    from torchtitan.models.common.config_utils import decoder_vocab_size
    from torchtitan.trainer import Trainer

    modes = {
        "none": None,
        "full": FullAC.Config(),
        "op": SelectiveAC.Config(),
        "memory_budget": MemoryBudgetAC.Config(),
    }
    if row.ac not in modes:
        raise SystemExit(f"TorchTitan 0.3 has no activation checkpointing of the kind {row.ac}")
    float8 = row.precision not in ("bf16", "fp32")
    compiled = row.compile and not (row.cpu and float8)
    spec = model_of(row, float8, compiled)
    tokenizer, dataloader, metrics = parts(row, windows)
    return Trainer.Config(
        model_spec=spec,
        dump_folder=tempfile.mkdtemp(),
        tokenizer=tokenizer,
        dataloader=dataloader,
        metrics=metrics,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec))),
        optimizer=default_adamw(lr=row.lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
        training=TrainingConfig(
            local_batch_size=row.batch,
            seq_len=row.seq_len,
            steps=row.steps,
            disable_cuda_graphs=row.cpu,
            mixed_precision_param="float32" if row.precision == "fp32" else "bfloat16",
        ),
        activation_checkpoint=modes[row.ac],
        debug=DebugConfig(seed=0, moe_force_load_balance=row.balanced),
        compile=CompileConfig(enable=compiled, backend="aot_eager" if row.cpu else "inductor"),
    )


def parts(row: SimpleNamespace, windows: list[dict]) -> tuple:
    """Return the configurations of the parts that are ours: tokenizer, dataloader, metrics."""
    import torch
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.components.metrics import BaseLogger, MetricsProcessor
    from torchtitan.components.tokenizer import BaseTokenizer

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any):
            pass

        encode = decode = get_vocab_size = None

    class RandomTokens(NoState, BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, **_: Any):
            pass

        def __iter__(self):
            # one document per sequence, which FlexAttention's mask requires
            positions = torch.arange(row.seq_len).repeat(row.batch, 1)
            for tokens, targets in random_tokens(row):
                yield {"input": tokens, "positions": positions.clone()}, targets

    class Sink(BaseLogger):
        def log(self, metrics: dict, step: int) -> None:
            windows.append(window(row, step, metrics))

    class Recorded(MetricsProcessor):
        @dataclass(kw_only=True, slots=True)
        class Config(MetricsProcessor.Config):
            pass

        def _build_metric_logger(self, **_: Any) -> BaseLogger:
            return Sink()

    return (
        NoTokenizer.Config(),
        RandomTokens.Config(),
        Recorded.Config(log_freq=row.window, disable_color_printing=True),
    )


def model_of(row: SimpleNamespace, float8: bool, compiled: bool):
    """Return TorchTitan's configuration of the row's model: that of a size of Llama 3, or of Qwen3 with experts,
    changed to the row's shape.
    """
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.models import llama3, qwen3

    dim, layers, heads, kv_heads, width, vocabulary = row.dimensions
    shape = {"dim": dim, "n_layers": layers, "n_heads": heads, "n_kv_heads": kv_heads, "attn_backend": "flex"}
    if row.experts:
        head, experts, chosen, expert_width = row.experts
        family, sizes = qwen3, qwen3.qwen3_configs
        rope = qwen3.CosSinRoPE.Config(dim=head, max_seq_len=40960, theta=1e6)
        blocks = qwen3._build_qwen3_moe_layers(
            **shape,
            head_dim=head,
            moe_hidden_dim=expert_width,
            num_experts=experts,
            top_k=chosen,
            moe_comm_backend="standard",
            rope=rope,
        )
        model = sizes["30B-A3B"](attn_backend="flex")
    else:
        family, sizes = llama3, llama3.llama3_configs
        rope = llama3.ComplexRoPE.Config(dim=dim // heads, max_seq_len=131072, theta=500000, scaling="llama")
        blocks = llama3._build_llama3_layers(**shape, hidden_dim=width, rope=rope)
        model = sizes["8B"](attn_backend="flex")
    model.dim, model.vocab_size, model.layers = dim, vocabulary, blocks
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = vocabulary, dim
    model.norm.normalized_shape, model.lm_head.in_features, model.lm_head.out_features = dim, dim, vocabulary
    if row.cpu:
        from torchtitan.models.common.attention import ScaledDotProductAttention

        for block in blocks:
            block.attention.inner_attention = ScaledDotProductAttention.Config()
    converters = None
    if row.precision == "tensorwise":
        raise SystemExit("TorchTitan 0.3 has no Float8 with a scale for each tensor")
    if float8:
        converters = [
            Float8LinearConverter.Config(
                recipe_name=row.precision, filter_fqns=["lm_head"], emulate=row.cpu, model_compile_enabled=compiled
            )
        ]
    sizes["row"] = lambda **_: model
    return family.model_registry("row", converters=converters)
