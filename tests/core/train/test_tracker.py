"""Compare the formulas of memory and messages with the bytes that a rank of the fake world holds and sends."""

from pathlib import Path

import pytest

from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.kernels import split_masters
from titan_hydra.core.train.count import count_rank
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan import memory, messages, time
from titan_hydra.experiments.plan.shape import shape_of

BASE = (
    "model=llama3_debug",
    "data=synthetic",
    "precision=bf16",
    "data.seq_len=512",
    "data.local_batch=4",
    "gpus=4",
    "comm=fake",
)
FLUX = ("precision=bf16", "model.n_layers=4", "model.double_layers=2", "model.text_len=64", "data.seq_len=320")
SMALL = "model.vocab_size=512"  # so that the peak is not during the loss
LAYOUTS = {
    "FSDP": (),
    "FSDP, full": ("ac=full", SMALL),
    "FSDP, op": ("ac=op", SMALL),
    "FSDP, op, without attention": ("ac=op", "ac.save_ops=[aten.mm]", SMALL),
    "FSDP, lean, accumulated": ("ac=lean", "data.global_batch=32"),
    "FSDP, chunked loss": ("loss=linear_cross_entropy", "loss.chunk_tokens=512"),
    "FSDP, documents": ("data=embedded", "data.document_mask=true"),
    "HSDP, float32": ("parallelism=hsdp", "precision=fp32"),
    "one rank": ("gpus=1", "parallelism=single", "ac=op"),
    "FSDP, split masters": ("optimizer.masters=split", SMALL, "ac=full"),
    "FSDP, split masters, bf16 sums": (
        "optimizer.masters=split",
        SMALL,
        "precision.reduce_dtype=bfloat16",
        "model.dim=512",
    ),
    "one rank, split masters": ("gpus=1", "parallelism=single", "optimizer.masters=split", "ac=lean", "model.dim=512"),
    "one rank, split masters, accumulated": (
        "gpus=1",
        "parallelism=single",
        "optimizer.masters=split",
        "ac=lean",
        "data.global_batch=8",
    ),
    "TP": ("parallelism=tp", "parallelism.tp=4", "ac=full"),
    "FSDP and TP": ("parallelism=fsdp_tp", "parallelism.tp=2", "model.n_kv_heads=4", "ac=op"),
    "TP without its splits of sequence and loss": (
        "parallelism=fsdp_tp",
        "parallelism.tp=2",
        "parallelism.sequence_parallel=false",
        "parallelism.loss_parallel=false",
    ),
    "PP, 1F1B": ("parallelism=fsdp_pp", "parallelism.pp=2", "pp_schedule=1f1b"),
    "PP, 1F1B, many microbatches": (
        "parallelism=fsdp_pp",
        "parallelism.pp=2",
        "pp_schedule=1f1b",
        "data.local_batch=32",
        "pp_schedule.microbatches=32",
        SMALL,
        "ac=full",
    ),
    "PP, interleaved, many microbatches": (
        "parallelism=fsdp_pp",
        "parallelism.pp=2",
        "pp_schedule=interleaved_1f1b",
        "data.local_batch=32",
        "pp_schedule.microbatches=32",
        SMALL,
        "ac=full",
    ),
    "PP, interleaved": ("parallelism=fsdp_pp", "parallelism.pp=2", "pp_schedule=interleaved_1f1b"),
    "PP, ZBV": ("parallelism=fsdp_pp", "parallelism.pp=2", "pp_schedule=zbv", SMALL),
    "PP and TP, op, chunked loss": (
        "parallelism=fsdp_tp_pp",
        "gpus=8",
        "parallelism.tp=2",
        "parallelism.pp=2",
        "ac=op",
        "loss=linear_cross_entropy",
        "model.vocab_size=16384",
    ),
    "CP, ring": ("parallelism=fsdp_cp", "parallelism.cp=2", "ac=full", SMALL),
    "CP, all-to-all": ("parallelism=fsdp_cp", "parallelism.cp=2", "parallelism.cp_rotate=alltoall"),
    **{
        f"{model}, {name}": (
            f"model={model}_debug",
            "model.v_head_dim=48" if model == "deepseek_v3" else SMALL,
            SMALL,
            *overrides,
        )
        for model in ("qwen3_moe", "deepseek_v3")
        for name, overrides in {
            "FSDP": (),
            "FSDP, full": ("ac=full",),
            "FSDP, ep 2, op": ("parallelism.ep=2", "ac=op"),
            "FSDP, ep 2, lean": ("parallelism.ep=2", "ac=lean"),
            "FSDP, ep 2, op, linears alone": ("parallelism.ep=2", "ac=op", "ac.save_ops=[aten.mm]"),
            "FSDP and TP, ep 2": ("parallelism=fsdp_tp_ep", "parallelism.tp=2", "parallelism.ep=2"),
            "PP, 1F1B, ep 2": ("parallelism=fsdp_pp_ep", "parallelism.pp=2", "parallelism.ep=2"),
        }.items()
    },
    **{
        f"FLUX, {name}": ("model=flux_debug", "objective=diffusion", "data=synthetic_images", *FLUX, *overrides)
        for name, overrides in {
            "FSDP": (),
            "FSDP, op": ("ac=op",),
            "FSDP, lean, accumulated": ("ac=lean", "data.global_batch=32"),
            "FSDP, full": ("ac=full",),
            "HSDP, float32": ("parallelism=hsdp", "precision=fp32"),
            "CP, Ulysses": ("parallelism=fsdp_cp", "parallelism.cp=2", "parallelism.cp_rotate=ulysses"),
        }.items()
    },
    **{
        f"{model}, {name}": (
            f"model={model}_debug",
            "objective=image_text",
            "data=synthetic_image_text",
            "objective.patches=512",
            *overrides,
        )
        for model, name, overrides in (
            ("llama3_vision", "FSDP", ()),
            ("llama3_vision", "FSDP, full", ("ac=full",)),
            ("qwen3_vision", "FSDP and TP, op", ("parallelism=fsdp_tp", "parallelism.tp=2", "ac=op")),
            (
                "qwen3_vision",
                "CP, Ulysses",
                ("parallelism=fsdp_cp", "parallelism.cp=2", "parallelism.cp_rotate=ulysses"),
            ),
            ("llama3_vision", "PP, 1F1B", ("parallelism=fsdp_pp", "parallelism.pp=2", "pp_schedule=1f1b")),
        )
    },
    "CP, Ulysses": ("parallelism=fsdp_cp", "parallelism.cp=2", "parallelism.cp_rotate=ulysses", SMALL, "ac=op"),
}


def test_an_update_joins_as_many_elements_as_planned():
    assert memory.CHUNK == split_masters.CHUNK


@pytest.mark.parametrize("name", LAYOUTS)
def test_formulas_give_what_is_counted(name):
    job = freeze(compose_unchecked(*BASE, *LAYOUTS[name]))
    assert not check(job)
    shape, peak = shape_of(job), memory.peak(job)
    counted = count_rank(job, peak.rank)
    assert peak.live == pytest.approx(counted.live, rel=0.05)
    sent = messages.of_step(shape, peak.pipeline_rank)
    assert {dim: size for dim, size in counted.messages.items() if size > 1e5} == pytest.approx(sent, rel=0.04)


def test_each_mode_keeps_less_than_the_one_before():
    """With narrow experts, as in DeepSeek-V3, the rows that are exchanged are most of what a block keeps."""
    line = ("model=deepseek_v3_debug", SMALL, "model.expert_dim=64", "parallelism.ep=2")
    modes = ("none", "lean", "op", "full")
    live = [count_rank(freeze(compose_unchecked(*BASE, *line, f"ac={mode}")), 0).live for mode in modes]
    assert live == sorted(live, reverse=True), dict(zip(modes, live, strict=True))


def test_the_page_names_each_term_and_each_part():
    page = (Path(__file__).parents[3] / "docs/plan.md").read_text()
    named = {
        name for line in page.splitlines() if line.startswith("| ") for name in line.split("|")[1].strip().split(", ")
    }
    for overrides in LAYOUTS.values():
        job = freeze(compose_unchecked(*BASE, *overrides, "hardware=h100"))
        assert {term.name for term in memory.peak(job).terms} | {*time.speed(job).parts} <= named
