"""List the layouts that make a step on the pretended device, and what each of them may do. Imports no torch."""

from dataclasses import dataclass

EXCHANGE = "core/parallel/experts.py AllToAll.sizes"
FINITE = "item at core/train/optimizer.py step"  # torch does not shard fused SGD, the only kind of SGD that can skip a step by itself
BASE = (
    "cluster.executor=slurm",
    "cluster.gpus_per_node=8",
    "data=synthetic",
    "data.seq_len=64",
    "data.local_batch=2",
    "checkpoint=off",
    "comm=fake",
    "precision=bf16",
)
LLAMA = (
    "model.dim=64",
    "model.n_heads=4",
    "model.n_kv_heads=2",
    "model.n_layers=2",
    "model.ffn_dim=192",
    "model.vocab_size=512",
)
# as wide as a model whose matrices are updated one or two at a time (core/train/offloaded.py)
WIDE = (*LLAMA, "model.dim=2048", "model.n_heads=16", "model.ffn_dim=8192", "model.vocab_size=32768")
QWEN, MOE, LATENT = ((f"model={family}_debug", "model.n_layers=2") for family in ("qwen3", "qwen3_moe", "deepseek_v3"))
VISION = (
    "model=llama3_vision_debug",
    "model.n_layers=2",
    "model.vision.n_layers=1",
    "data=synthetic_image_text",
    "objective=image_text",
)
FLUX = (
    "model=flux_debug",
    "model.n_layers=4",
    "model.double_layers=2",
    "data=synthetic_images",
    "objective=diffusion",
    "data.seq_len=264",
)


@dataclass(frozen=True)
class Layout:
    """A layout, and what its step may do. `reads` has each place where the host reads from the device, the value that
    it reads, and how often it reads.
    """

    overrides: tuple[str, ...]
    ranks: int
    reads: tuple[tuple[str, int, int], ...] = ()
    gathers: int | None = None

    @property
    def waits(self) -> dict[str, int]:
        """Return the places where the host may wait, and how often."""
        finite = {FINITE: 1} if any(override.startswith("optimizer=sgd") for override in self.overrides) else {}
        return finite | {f"tolist at {place}": times for place, _, times in self.reads}


def layout(ranks: int, model: tuple[str, ...], *overrides: str, samples: int, reads=(), gathers=None) -> Layout:
    """Return a layout of a global batch of `samples`."""
    chosen = (*BASE, *model, f"gpus={ranks}", f"data.global_batch={samples}", *overrides)
    return Layout(tuple({override.partition("=")[0]: override for override in chosen}.values()), ranks, reads, gathers)


LAYOUTS = {
    "llama3, single, split masters, chunked loss, ac lean": layout(
        1, LLAMA, "parallelism=single", "optimizer.masters=split", "loss=linear_cross_entropy", "ac=lean", samples=2
    ),
    # For each microbatch: two blocks and the embedding, in forward and backward, and the head once.
    "llama3, fsdp 2, three microbatches": layout(2, LLAMA, "parallelism=fsdp", samples=12, gathers=21),
    "llama3, fsdp 2, ac offload": layout(
        2, LLAMA, "parallelism=fsdp", "ac=offload", "model.n_layers=3", "compile=off", samples=8
    ),
    "llama3, tp 2, ac offload": layout(2, LLAMA, "parallelism=tp", "ac=offload", "model.n_layers=3", samples=4),
    "llama3, pp 2, 1f1b, ac offload": layout(
        2, LLAMA, "parallelism=pp", "ac=offload", "model.n_layers=6", "data.local_batch=4", samples=4
    ),
    "qwen3_moe, fsdp 2, ep 2, ac offload": layout(
        2,
        MOE,
        "parallelism=fsdp_ep",
        "parallelism.ep=2",
        "ac=offload",
        "model.n_layers=3",
        samples=4,
        reads=((EXCHANGE, 128, 3),),
    ),
    "llama3, fsdp 2, states offloaded": layout(2, WIDE, "parallelism=fsdp", "optimizer.offload=true", samples=4),
    "llama3, tp 2, split masters, states offloaded": layout(
        2, LLAMA, "parallelism=tp", "optimizer.offload=true", "optimizer.masters=split", samples=2
    ),
    "llama3, pp 2, 1f1b, states offloaded": layout(
        2, LLAMA, "parallelism=pp", "optimizer.offload=true", "optimizer.ema_decay=0.9", samples=2
    ),
    "qwen3_moe, fsdp 2, ep 2, states offloaded": layout(
        2,
        MOE,
        "parallelism=fsdp_ep",
        "parallelism.ep=2",
        "optimizer.offload=true",
        samples=4,
        reads=((EXCHANGE, 128, 2),),
    ),
    "llama3, hsdp 4, muon": layout(4, LLAMA, "parallelism=hsdp", "optimizer=muon", samples=8),
    "llama3, tp 2, lora": layout(2, LLAMA, "parallelism=tp", "adapter=lora", samples=2),
    "llama3, fsdp 4, tp 2, float8 tensorwise": layout(
        4, LLAMA, "parallelism=fsdp_tp", "parallelism.tp=2", "precision=float8_tensorwise", samples=4
    ),
    "llama3, cp 2, ring by allgather": layout(2, LLAMA, "parallelism=cp", samples=2),
    "llama3, cp 2, ring by alltoall": layout(2, LLAMA, "parallelism=cp", "parallelism.cp_rotate=alltoall", samples=2),
    "llama3, cp 2, ulysses, documents": layout(
        2, LLAMA, "parallelism=cp", "parallelism.cp_rotate=ulysses", "data.document_mask=true", samples=2
    ),
    "llama3, pp 2, zbv": layout(
        2, LLAMA, "parallelism=pp", "pp_schedule=zbv", "model.n_layers=4", "data.local_batch=4", samples=4
    ),
    "qwen3, fsdp 4, pp 2, 1f1b, ac full": layout(
        4, QWEN, "parallelism=fsdp_pp", "ac=full", "data.local_batch=4", samples=8
    ),
    "qwen3, fsdp 2, float8 rowwise": layout(2, QWEN, "parallelism=fsdp", "precision=float8_rowwise", samples=4),
    # The host reads the numbers of rows once for each layer, and does not read them again when the forward is
    # recomputed.
    "qwen3_moe, fsdp 2, ep 2, ac full": layout(
        2, MOE, "parallelism=fsdp_ep", "parallelism.ep=2", "ac=full", samples=4, reads=((EXCHANGE, 128, 2),)
    ),
    "qwen3_moe, tp 2, ep 2, balanced": layout(
        2, MOE, "parallelism=tp", "parallelism.ep=2", "debug.balance_experts=true", samples=2
    ),
    "deepseek_v3, fsdp 2, documents": layout(2, LATENT, "parallelism=fsdp", "data.document_mask=true", samples=4),
    "image_text, fsdp 2": layout(2, VISION, "parallelism=fsdp", samples=4),
    "flux, fsdp 2": layout(2, FLUX, "parallelism=fsdp", samples=4),
}


def of_matrix() -> dict[str, Layout]:
    """Return the layouts of the acceptance matrix as they run on a GPU: in bfloat16, with real Float8. Loads of experts
    are even, because otherwise the values that the host reads are not known.
    """
    from titan_hydra.instruments.verify.case import BASE as SIZES
    from titan_hydra.instruments.verify.matrix import MATRIX

    found = {}
    for case in MATRIX:
        sparse = any(override.startswith(("model=qwen3_moe", "model=deepseek")) for override in case.base)
        chosen = (
            *BASE,
            *SIZES,
            "precision=bf16",
            f"debug.balance_experts={str(sparse).lower()}",
            *case.base,
            *case.overrides,
        )
        by_key = {override.partition("=")[0]: override for override in chosen}
        by_key["precision"] = by_key["precision"].replace("fp32", "bf16").replace("float8_emulate", "float8_rowwise")
        for key in ("precision.emulate", "precision.compute_dtype"):
            by_key.pop(key, None)
        found[case.name] = Layout(tuple(by_key.values()), case.ranks)
    return found
