"""Step layouts of all families on the pretended device: `python layouts.py GUARD OUT [NAME ...]` writes what each rank did as JSON.

A process of its own: it changes torch for good, and the library GUARD has to be loaded before torch.
"""
import dataclasses
import json
import os
import sys
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SMALL = ("model.dim=64", "model.n_heads=4", "model.n_kv_heads=2", "model.n_layers=2", "model.ffn_dim=192", "model.vocab_size=512")
BASE = ("cluster.executor=slurm", "cluster.gpus_per_node=8", "data=synthetic", "data.seq_len=64", "checkpoint=off", "comm=fake", "precision=bf16")
VISION = ("model=llama3_vision_debug", "model.n_layers=2", "model.vision.n_layers=1", "data=synthetic_image_text", "train.objective=image_text")
EXCHANGE = "parallel/experts.py AllToAll.forward"
FLUX = ("model=flux_debug", "model.n_layers=4", "model.double_layers=2", "data=synthetic_images", "train.objective=diffusion", "data.seq_len=264")


@dataclass(frozen=True)
class Layout:
    """A layout and what the host may wait for in its step, beside the one wait of all: `answers` has the place and what is read there."""

    overrides: tuple[str, ...]
    answers: tuple[tuple[str, int], ...] = ()


def layout(ranks, *overrides, batch=2, microbatches=1, model=SMALL, answers=()):
    """Return a layout of `ranks` whose data-parallel degree is worked out; `batch` is the local batch."""
    chosen = (*BASE, *model, f"gpus={ranks}", f"data.local_batch={batch}", *overrides)
    return Layout(tuple({override.partition("=")[0]: override for override in chosen}.values()), answers)


LAYOUTS = {
    "llama3 single, split masters, chunked loss": layout(1, "parallelism=single", "optimizer.masters=split", "loss=linear_cross_entropy", "ac=lean"),
    "llama3 fsdp, three microbatches": layout(2, "parallelism=fsdp", "data.global_batch=12"),
    "llama3 hsdp, muon": layout(4, "parallelism=hsdp", "optimizer=muon", "data.global_batch=8"),
    "llama3 tp, lora": layout(2, "parallelism=tp", "adapter=lora", "data.global_batch=2"),
    "llama3 fsdp + tp, float8 tensorwise": layout(4, "parallelism=fsdp_tp", "parallelism.tp=2", "precision=float8_tensorwise", "data.global_batch=4"),
    "llama3 cp, ring by allgather": layout(2, "parallelism=cp", "data.global_batch=2"),
    "llama3 cp, ring by alltoall": layout(2, "parallelism=cp", "parallelism.cp_rotate=alltoall", "data.global_batch=2"),
    "llama3 cp, ulysses, documents": layout(2, "parallelism=cp", "parallelism.cp_rotate=ulysses", "data.document_mask=true", "data.global_batch=2"),
    "llama3 pp, zbv": layout(2, "parallelism=pp", "pp_schedule=zbv", "model.n_layers=4", "data.global_batch=4", batch=4),
    "qwen3 fsdp + pp, 1f1b": layout(4, "parallelism=fsdp_pp", "data.global_batch=8", "ac=full", model=("model=qwen3_debug", "model.n_layers=2"), batch=4),
    "qwen3 fsdp, float8 rowwise": layout(2, "parallelism=fsdp", "precision=float8_rowwise", "data.global_batch=4", model=("model=qwen3_debug", "model.n_layers=2")),
    "qwen3_moe fsdp, ep": layout(2, "parallelism=fsdp_ep", "parallelism.ep=2", "data.global_batch=4", model=("model=qwen3_moe_debug", "model.n_layers=2"), answers=((EXCHANGE, 128),)),
    "qwen3_moe tp, ep": layout(2, "parallelism=tp", "parallelism.ep=2", "data.global_batch=2", model=("model=qwen3_moe_debug", "model.n_layers=2"), answers=((EXCHANGE, 64),)),
    "deepseek_v3 fsdp, documents": layout(2, "parallelism=fsdp", "data.document_mask=true", "data.global_batch=4", model=("model=deepseek_v3_debug", "model.n_layers=2")),
    "image_text fsdp": layout(2, "parallelism=fsdp", *VISION, "data.global_batch=4", model=()),
    "flux fsdp": layout(2, "parallelism=fsdp", *FLUX, "data.global_batch=4", model=()),
}


def step(chosen, rank, plant=None):
    """Return the record of one rank's step."""
    import torch
    from record import Recorder

    from titan_hydra.config import compose_job
    from titan_hydra.verify.fake import fake_step, fake_world

    job = compose_job(*chosen.overrides)
    job.comm.rank = rank

    @contextmanager
    def watch(trainer, batch):
        update = trainer.update
        trainer.update = lambda agreement: (update(agreement), agreement.read())  # as the loop does
        names = {module: name for name, module in trainer.model.named_modules()}
        with Recorder(names, chosen.answers) as recorder, torch.autograd.set_multithreading_enabled(False):
            found.append(recorder.record)
            yield

    found = []
    forget_meshes()
    with fake_world(job):
        fake_step(job, watch, torch.device("cuda", 0))
    return found[0]


def forget_meshes():
    """Forget what DTensor remembers of the mesh of another rank of this world, which is equal but has other groups."""
    from torch.distributed.tensor import DTensor, debug

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(debug, name, lambda: None)()


def ranks_of(chosen):
    return range(next(int(override[5:]) for override in chosen.overrides if override.startswith("gpus=")))


def as_json(value):
    if isinstance(value, set):
        return sorted(value)
    return vars(value) if dataclasses.is_dataclass(value) else str(value)


def main(guard, out, *names):
    sys.path.insert(1, os.environ["PROJECT"])
    import device

    device.pretend(Path(guard))
    import attention

    attention.choose_kernels()
    from record import disagreements

    results = {}
    for name in names or LAYOUTS:
        began, records, error = time.perf_counter(), {}, None
        try:
            for rank in ranks_of(LAYOUTS[name]):
                records[rank] = step(LAYOUTS[name], rank)
        except Exception:
            error = traceback.format_exc()
            import torch.distributed as dist
            if dist.is_initialized():
                dist.destroy_process_group()
        results[name] = {"error": error, "ranks": records, "disagreements": disagreements(records)}
        print(f"{name}: {time.perf_counter() - began:.1f} s", (error or "")[-1500:], results[name]["disagreements"][:3], flush=True)
    Path(out).write_text(json.dumps(results, default=as_json, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
