"""Adapters are equal on every layout, saved without the base, merged exactly, and compute what Hugging Face's PEFT
computes with them.
"""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.core.checkpoint.steps import cut_back, tensors
from titan_hydra import cli
from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.convert import find_checkpoint, reader_of
from titan_hydra.core.checkpoint.reader import Reader
from titan_hydra.core.job.config import Job, from_dict, identity
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.run.checkpoints import newest
from titan_hydra.core.models.hf import meta_state
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.parallel import lora
from titan_hydra.core.parallel.mesh import Mesh, local_part
from titan_hydra.core.train.fake import fake_world
from titan_hydra.core.train.trainer import assemble
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.plan import memory
from titan_hydra.instruments.verify.case import case
from titan_hydra.instruments.verify.verify import verify

LORA = ("adapter=lora", "adapter.rank=4")
LAYOUTS = {
    "fsdp 2 x tp 2": (4, "parallelism=fsdp_tp", "parallelism.dp_shard=2", "parallelism.tp=2", "data.local_batch=8"),
    "tp 2, whole sequences": (2, "parallelism=tp", "parallelism.sequence_parallel=false", "data.local_batch=16"),
    "hsdp": (4, "parallelism=hsdp", "data.local_batch=4"),
    "cp 2": (2, "parallelism=cp", "data.local_batch=16"),
    "pp 2": (2, "parallelism=pp", "data.local_batch=16"),
    "pp 2, zbv": (2, "parallelism=pp", "pp_schedule=zbv", "data.local_batch=16"),
    "checkpointed": (2, "parallelism=fsdp", "ac=full", "data.local_batch=8"),
    "compiled": (2, "parallelism=fsdp", "compile=block", "compile.backend=aot_eager", "data.local_batch=8"),
}
# With SGD, whose steps are proportional to the gradients, the weights show also the gradients of A, which are 0 at
# first.
SGD = (*LORA, "optimizer=sgd", "optimizer.lr=1.0", "optimizer.weight_decay=0", "lr_scheduler.warmup_steps=1")


def test_every_layout_learns_what_one_process_learns():
    """Layouts in bf16 are in the acceptance matrix."""
    for outcome in verify(
        [case(name, ranks, *words, base=SGD, gradients=2e-5) for name, (ranks, *words) in LAYOUTS.items()], steps=3
    ):
        assert outcome.passed, outcome


@pytest.mark.parametrize(
    "words",
    [
        ("parallelism=tp", "gpus=2"),
        ("parallelism=fsdp_tp", "gpus=4", "parallelism.tp=2", "parallelism.dp_shard=2"),
        ("parallelism=fsdp_tp", "gpus=8", "parallelism.tp=2", "parallelism.dp_shard=4"),
        ("parallelism=pp", "gpus=2"),
        ("parallelism=pp", "gpus=4", "parallelism.tp=2"),
        ("parallelism=fsdp_tp", "gpus=4", "model.tie_embeddings=true"),
    ],
    ids=" ".join,
)
def test_the_base_is_held_in_the_compute_dtype_and_the_plan_counts_that(words):
    job = freeze(
        compose_job("model=llama3_debug", "data=synthetic", "precision=bf16", "comm=fake", "adapter=lora", *words)
    )
    with fake_world(job):
        stages = assemble(job, torch.device("cpu")).stages
        held = [
            (name, parameter.requires_grad, local_part(parameter))
            for stage in stages
            for name, parameter in stage.named_parameters()
        ]
    assert {part.dtype for name, _, part in held if ".lora_" not in name} == {torch.bfloat16}
    assert {part.dtype for name, _, part in held if ".lora_" in name} == {torch.float32}
    assert all(trained == (".lora_" in name) for name, trained, _ in held)
    planned = next(term.bytes for term in memory.peak(job).terms if term.name == "weights")
    assert sum(part.nbytes for *_, part in held) == pytest.approx(planned, rel=0.01)


def test_a_starts_as_in_the_papers_code_and_b_at_zero():
    """The paper's code and PEFT initialize A as nn.Linear initializes its weight: kaiming_uniform with a = sqrt(5)."""
    job = compose_job("debug=tiny", "adapter=lora", "adapter.rank=256")
    model = models.build(job.model, job.data.seq_len)
    lora.apply(model, Mesh(job.parallelism, None, None, None, None), job)
    init_weights(model.to_empty(device="cpu"), job.model, job.seed)
    adapted = [module for module in model.modules() if isinstance(module, lora.LoraLinear)]
    assert {linear.in_features for linear in adapted} == {64, 256}
    for linear in adapted:
        expected = torch.nn.init.kaiming_uniform_(torch.empty_like(linear.lora_a), a=5**0.5).std().item()
        assert linear.lora_a.std().item() == pytest.approx(expected, rel=0.03) and not linear.lora_b.any()


@pytest.fixture
def pretrained(tiny, run_job):
    """Return a run to whose weights adapters can be added."""
    return run_job(tiny("steps=2", "model.n_heads=4"))


@pytest.fixture
def adapted(tiny, run_job, pretrained):
    """Return a function that trains adapters for four steps, starting with a B far from zero."""

    def train(*words):
        job = tiny(
            *LORA,
            "steps=4",
            "optimizer.lr=0.05",
            "checkpoint.interval=2",
            "checkpoint.keep_latest_k=0",
            f"checkpoint.initial_load_path={pretrained}",
            *words,
        )
        return job, run_job(job)

    return train


def test_checkpoints_hold_adapters_alone_and_resuming_is_bitwise(adapted, run_job, tmp_path):
    job, whole = adapted("parallelism=fsdp", "gpus=2", "data.global_batch=4")
    stored = tensors(newest(whole / "checkpoints"))
    assert all(".lora_" in name for name in stored if name.startswith("model.")) and any(
        ".lora_a" in name for name in stored
    )
    same = run_job(job, cut_back(whole, 2, tmp_path / "same"))
    assert run_job.losses(same) == run_job.losses(whole)
    after = tensors(newest(same / "checkpoints"))
    assert stored.keys() == after.keys() and all(torch.equal(stored[name], after[name]) for name in stored)


def test_the_base_is_frozen_and_adapters_begin_as_nothing(tiny, run_job, pretrained):
    """At a learning rate of 0 the first loss is that of the base. A base that is rounded to bf16 gives the same losses
    as weights that are cast.
    """
    words = ("steps=1", "optimizer.lr=0", f"checkpoint.initial_load_path={pretrained}")
    for dtype in ("float32", "bfloat16"):
        for layout in (("parallelism=single",), ("parallelism=fsdp", "gpus=2", "data.local_batch=1")):
            job, beside = (tiny(*words, *more, *layout, f"precision.compute_dtype={dtype}") for more in ((), LORA))
            assert run_job.losses(run_job(job)) == run_job.losses(run_job(beside)), (dtype, layout)


def test_merged_weights_are_the_base_and_the_product(adapted, pretrained):
    job, run = adapted("parallelism=single")
    merged, base = reader_of(find_checkpoint(run)), Reader(find_checkpoint(pretrained))
    stored = tensors(newest(run / "checkpoints"))
    changed = 0
    for name, shape in ((name, tensor.shape) for name, tensor in meta_state(job.model).items()):
        weight, expected = merged.tensor(name, shape, torch.float32), base.tensor(name, shape, torch.float32)
        stem = f"model.{name.removesuffix('weight')}"
        if f"{stem}lora_a" in stored:
            changed += 1
            expected = expected + 8.0 * stored[f"{stem}lora_b"] @ stored[f"{stem}lora_a"]  # 8 = alpha 32 / rank 4
            assert (weight - base.tensor(name, shape, torch.float32)).abs().max() > 1e-3
        torch.testing.assert_close(weight, expected, rtol=0, atol=1e-6)
    assert changed == 7 * job.model.n_layers


def test_the_base_may_be_a_hugging_face_folder(adapted, run_job, pretrained, tmp_path):
    """The folder is read when the run starts, when it resumes, and when its adapters are merged."""
    assert cli.main(["checkpoint", "export", str(pretrained), str(tmp_path / "base"), "--dtype", "float32"]) == 0
    layout = ("parallelism=fsdp", "gpus=2", "data.global_batch=4")
    (job, one), (_, other) = adapted(*layout), adapted(*layout, f"checkpoint.initial_load_path={tmp_path / 'base'}")
    assert run_job.losses(one) == run_job.losses(other)
    same = cut_back(other, 2, tmp_path / "same")
    from_folder = from_dict(Job, json.loads((same / "config.json").read_text()))
    assert run_job.losses(run_job(from_folder, same)) == run_job.losses(one)
    merged, expected = reader_of(find_checkpoint(other)), reader_of(find_checkpoint(one))
    for name, shape in ((name, tensor.shape) for name, tensor in meta_state(job.model).items()):
        assert torch.equal(merged.tensor(name, shape, torch.float32), expected.tensor(name, shape, torch.float32))


def test_exports_load_in_transformers_and_peft(adapted, pretrained, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    _, run = adapted("parallelism=single", "adapter.linears=[wq,wo,w2]", "model.vocab_size=4096")
    for source, kind, name in ((pretrained, "hf", "base"), (run, "hf", "merged"), (run, "peft", "peft")):
        assert (
            cli.main(
                ["checkpoint", "export", str(source), str(tmp_path / name), "--format", kind, "--dtype", "float32"]
            )
            == 0
        ), capsys.readouterr()
    tokens = torch.randint(4096, (2, 16))
    with torch.no_grad():
        base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        before = base(tokens).logits
        whole = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        merged = whole(tokens).logits
        assert (merged - before).abs().max() > 1e-2
        config = json.loads((tmp_path / "peft/adapter_config.json").read_text())
        assert config["target_modules"] == ["down_proj", "o_proj", "q_proj"]
        # what PEFT adds to a weight, as it documents its file
        adapters = load_file(tmp_path / "peft/adapter_model.safetensors")
        for name in (name for name in adapters if "lora_A" in name):
            added = adapters[name.replace("lora_A", "lora_B")] @ adapters[name] * config["lora_alpha"] / config["r"]
            weight = name.removeprefix("base_model.model.").replace(".lora_A", "")
            difference = whole.get_parameter(weight) - base.get_parameter(weight)
            torch.testing.assert_close(difference, added, rtol=1e-4, atol=1e-6)
        peft = pytest.importorskip("peft")
        beside = peft.PeftModel.from_pretrained(base, tmp_path / "peft")(tokens).logits
    torch.testing.assert_close(beside, merged, rtol=1e-4, atol=1e-5)
    assert cli.main(["generate", str(run), "--prompt", "a", "--max-tokens", "3"]) == 0
    assert cli.main(["checkpoint", "export", str(pretrained), str(tmp_path / "none"), "--format", "peft"]) == 2
    assert "was trained without adapters; export it with --to hf" in capsys.readouterr().err


def test_adapters_go_on_from_earlier_ones_beside_the_same_base(adapted, tiny, run_job, tmp_path):
    """So `titan resume RUN steps=N` trains them longer, twice here: bitwise as a run of that length."""
    layout = ("parallelism=fsdp", "gpus=2", "data.global_batch=4", "lr_scheduler=constant")
    job, short = adapted(*layout)
    whole = run_job(adapted(*layout, "steps=8")[0])
    before = short
    for steps, step in ((6, 4), (8, 6)):
        start = before / f"checkpoints/step-{step:08d}"
        words = (
            *LORA,
            "optimizer.lr=0.05",
            "checkpoint.interval=2",
            "checkpoint.keep_latest_k=0",
            *layout,
            f"steps={steps}",
        )
        before = run_job(tiny(*words, f"checkpoint.initial_load_path={start}", "checkpoint.exclude_from_loading=[]"))
    theirs = run_job.losses(whole)
    assert run_job.losses(before) == {step: theirs[step] for step in (7, 8)}
    ours, others = (reader_of(find_checkpoint(run)) for run in (before, whole))
    for name, shape in ((name, tensor.shape) for name, tensor in meta_state(job.model).items()):
        assert torch.equal(ours.tensor(name, shape, torch.float32), others.tensor(name, shape, torch.float32))
    resumed = cut_back(whole, 6, tmp_path / "cut")
    assert run_job.losses(run_job(from_dict(Job, json.loads((resumed / "config.json").read_text())), resumed)) == theirs
    path = f"checkpoint.initial_load_path={short}"
    for words, line in (
        (
            (*LORA, "adapter.alpha=16"),
            f"adapter.alpha=16.0: the adapters in {short} were trained with 32.0; nearest legal: 32.0",
        ),
        ((), f"{path}: holds adapters alone; titan checkpoint export writes their merged weights"),
    ):
        with pytest.raises(ConfigError) as error:
            tiny(*words, path)
        assert line in str(error.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["adapter.linears=[wq,wx]"],
            "adapter.linears=[wq,wx]: llama3 has no linear wx; nearest legal: [wq,wk,wv,wo,w1,w3,w2]",
        ),
        (
            ["adapter.experts=true"],
            "adapter.experts=true: llama3 has no experts that adapter=lora adapts; nearest legal: false",
        ),
        (
            ["model=qwen3_moe_debug", "adapter.experts=true", "adapter.rank=12", "precision.compute_dtype=bfloat16"],
            "adapter.rank=12: adapters of experts need multiples of 8 on this layout; nearest legal: 8 or 16",
        ),
        (
            ["model=deepseek_v3_debug", "model.n_kv_heads=4", "parallelism=tp", "gpus=2"],
            "adapter.linears=[]: with parallelism.tp=2 each rank computes all of wq_a, and its adapter has no part; "
            "nearest legal: [wq_b,wkv_b,wo,w1,w3,w2]",
        ),
        (
            ["precision=float8_emulate"],
            "precision.converter=float8: adapter=lora needs plain linears; nearest legal: null",
        ),
        (
            ["loss=linear_cross_entropy"],
            "loss.name=linear_cross_entropy: it computes the gradient of the head, which adapter=lora freezes; "
            "nearest legal: cross_entropy",
        ),
        (
            ["parallelism.backend=simple_fsdp"],
            "parallelism.backend=simple_fsdp: adapter=lora has frozen weights, which this backend does not shard; nearest legal: fsdp2",
        ),
        (
            ["checkpoint.export_dtype=float32"],
            "checkpoint.export_dtype=float32: adapter=lora is exported by titan checkpoint export; nearest legal: null",
        ),
    ],
)
def test_what_adapters_cannot_be_combined_with_is_one_line(words, line):
    with pytest.raises(ConfigError) as error:
        compose_job("debug=tiny", "adapter=lora", *words)
    assert str(error.value) == line


def test_rank_is_not_read_without_adapters_and_old_runs_keep_their_names():
    with pytest.raises(ConfigError, match=r"adapter\.rank=4: adapter.name=none does not read it; lora would"):
        compose_job("adapter.rank=4")
    assert identity(compose_job()) == identity(compose_job("adapter=none")) != identity(compose_job("adapter=lora"))
