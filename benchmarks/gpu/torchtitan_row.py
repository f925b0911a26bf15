"""Run one row with TorchTitan's own trainer and print what it measured as one JSON line: python -P torchtitan_row.py
SETTINGS.

SETTINGS is run.py's row as JSON. torchtitan_03.py configures TorchTitan 0.3; torchtitan_02.py configures 0.2.2, the
newest release that runs on torch 2.11. The trainer itself is unchanged but for a clock around its first step and a
profiler around its last two.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch
from torch.profiler import ProfilerActivity, profile, schedule

# TorchTitan's data and logging modules import these, but nothing that runs here uses them. They are large, so they are
# not carried to the card.
UNUSED = {
    "datasets": ("datasets", "datasets.distributed"),
    "tokenizers": ("tokenizers",),
    "tensorboard": ("torch.utils.tensorboard",),
}


def main(row: SimpleNamespace) -> None:
    for package, modules in UNUSED.items():
        if importlib.util.find_spec(package) is None:
            sys.modules.update({name: MagicMock() for name in modules})
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    release = adapter()
    if row.cpu:
        pretend_device(release)
    from torchtitan.tools.logging import init_logger

    init_logger()
    windows: list[dict] = []
    configuration = release.configuration(row, windows)
    trainer = timed(release.trainer_class(), row)(configuration)
    block = trainer.model_parts[0].layers["0"]
    widths = release.expert_shape(block) if row.experts else block.feed_forward.w1.weight.shape[:1]
    assert tuple(widths) == (tuple(row.experts[1::2]) if row.experts else (row.dimensions[4],))
    trainer.train()
    print(
        json.dumps(
            {
                "windows": windows,
                "first_step_seconds": trainer.first_step_seconds,
                "flops_per_token": trainer.metrics_processor.num_flops_per_token,
            }
        ),
        flush=True,
    )


def adapter() -> ModuleType:
    """Return the adapter file, beside this one, for the installed release."""
    version = importlib.metadata.version("torchtitan")
    name = "torchtitan_02" if version.startswith("0.2.") else "torchtitan_03"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def random_tokens(row: SimpleNamespace):
    """Yield batches of random tokens and their targets [batch, seq], the same in every run."""
    generator = torch.Generator().manual_seed(0)
    while True:
        tokens = torch.randint(0, row.dimensions[-1], (row.batch, row.seq_len + 1), generator=generator)
        yield tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class NoState:
    """Give a dataloader an empty state in checkpoints. A row saves no checkpoint, but TorchTitan's dataloaders must
    have both methods.
    """

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None:
        pass


def window(row: SimpleNamespace, step: int, metrics: dict) -> dict:
    """Select the values to keep from the metrics that TorchTitan logs at a step."""
    memory = {"active_gib": metrics["memory/max_active(GiB)"], "reserved_gib": metrics["memory/max_reserved(GiB)"]}
    return {
        "step": step,
        "tokens_per_second": metrics["throughput(tps)"],
        "loss": metrics["loss_metrics/global_avg_loss"],
        **(dict.fromkeys(memory) if row.cpu else memory),
    }


def timed(trainer: type, row: SimpleNamespace) -> type:
    """Return TorchTitan's trainer, extended to time its first step and, if the row wants a trace, to record its last
    two steps.
    """

    class Timed(trainer):
        first_step_seconds = None
        profiler = None

        def train_step(self, batches) -> None:
            if row.trace and self.step == row.steps - 2:
                activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (not row.cpu)]
                self.profiler = profile(
                    activities=activities,
                    schedule=schedule(wait=0, warmup=1, active=2),
                    on_trace_ready=lambda profiler: profiler.export_chrome_trace(row.trace),
                )
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


def pretend_device(release: ModuleType) -> None:
    """Let TorchTitan run on a CPU: its modules look up the device once, when they are imported."""

    def nothing(*_, **__) -> None:
        pass

    module = SimpleNamespace(
        set_device=nothing,
        current_device=lambda: 0,
        get_device_name=lambda _: "cpu",
        reset_peak_memory_stats=nothing,
        empty_cache=nothing,
        get_device_properties=lambda _: SimpleNamespace(total_memory=1 << 34),
        memory_stats=lambda _: {},
        synchronize=nothing,
        manual_seed_all=nothing,
        device_count=lambda: 1,
    )
    torch.cuda.synchronize = torch.distributed.barrier = nothing  # with one rank there is no other rank to wait for
    release.emulate_float8()
    for name, found in list(sys.modules.items()):
        if name.startswith("torchtitan"):
            for attribute, value in (("device_module", module), ("device_type", "cpu")):
                if hasattr(found, attribute):
                    setattr(found, attribute, value)


if __name__ == "__main__":
    sys.modules["torchtitan_row"] = sys.modules["__main__"]  # the adapters import this module by this name
    status = 1
    try:
        main(SimpleNamespace(**json.loads(sys.argv[1])))
        status = 0
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # exit without waiting for process groups and the compiler's workers
