"""Models of transformers train as in transformers' own single process in float64, keep their format, and are refused where
a layout cannot keep them.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.recipes.transformers import table
from tests.recipes.transformers.families import CASE, FAMILIES, JOB, differences, folder_of, job, traced
from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.convert import export_hf
from titan_hydra.core.job.config import identity, to_dict
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.job.run.checkpoints import newest
from titan_hydra.core.models import build
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.parallel import loss_head
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan.command_plan import proof
from titan_hydra.experiments.plan.predict import predict
from titan_hydra.experiments.plan.shape import NotPredictable
from titan_hydra.instruments.verify.reduce import job_pairs, reduced
from titan_hydra.instruments.verify.verify import exact
from titan_hydra.recipes.transformers.config import PROVEN, WITH_EXPERTS

QUICK = ("gpt_oss",)  # windows, experts, sinks, biases
TP = "parallelism.sequence_parallel=false"
ONE = ("parallelism=single", "data.local_batch=8")
FSDP = ("parallelism=fsdp", "data.local_batch=4")
CP = ("parallelism=cp", "parallelism.cp_rotate=ulysses")
LAYOUTS = {  # by the number of ranks
    1: {"single": ONE},
    2: {
        "fsdp 2": FSDP,
        "ddp 2, accumulation, ac": ("parallelism=ddp", "data.local_batch=2", "ac=full"),
        "tp 2, accumulation": ("parallelism=tp", "data.local_batch=2", TP),
        "cp 2": (*CP, "data.local_batch=4"),
    },
    4: {
        "hsdp 4": ("parallelism=hsdp", "data.local_batch=2"),
        "fsdp 2, tp 2": ("parallelism=fsdp_tp", "parallelism.tp=2", "data.local_batch=4", TP, "ac=full"),
        "fsdp 2, cp 2": (*CP, "parallelism.dp_shard=2", "parallelism.cp=2", "data.local_batch=2", "ac=full"),
    },
}
HALF = ("precision=bf16", "ac=op")  # beside each layout of two ranks, for another family each
CHUNKS = ("loss=linear_cross_entropy", "loss.chunk_tokens=100")


def found_by(kinds, root, ranks):
    """Trace some families on all layouts of so many ranks, each family in bf16 too."""
    jobs = {}
    for kind in kinds:
        folder = folder_of(kind, root)
        for name, words in LAYOUTS[ranks].items():
            jobs[f"{kind}, {name}"] = job(folder, f"gpus={ranks}", *words)
        if ranks == 2:
            chunks = CHUNKS if kind != "gemma2" else ()
            jobs[f"{kind}, bf16"] = job(folder, "gpus=2", *LAYOUTS[2]["fsdp 2"], *HALF, *chunks)
            jobs[f"{kind}, bf16, cp 2"] = job(folder, "gpus=2", *LAYOUTS[2]["cp 2"], *HALF, *chunks)
            jobs[f"{kind}, bf16, tp 2"] = job(folder, "gpus=2", *LAYOUTS[2]["tp 2, accumulation"], *HALF, *chunks)
    return traced(root, ranks, jobs)


def assert_learns_what_transformers_learns(kinds, root, layouts):
    alone = found_by(kinds, root, 1)
    expected = {kind: exact(job(folder_of(kind, root), *ONE), CASE) for kind in kinds}
    for ranks in layouts:
        for name, found in (alone if ranks == 1 else found_by(kinds, root, ranks)).items():
            kind, own = name.split(",")[0], differences(found, expected[name.split(",")[0]])
            loss, norm = own.pop("losses"), own.pop("norms")
            worst = next(iter(own.items()))
            start = alone[f"{kind}, single"]["start"]
            assert all(torch.equal(start[name], value) for name, value in found["start"].items()), name
            assert (found["drift"], found["rounded"]) == (0, 0), name
            # in bfloat16 a token near the border between two experts may choose the other one
            half = 0.2 if any("experts" in name for name in FAMILIES[kind]) else 5e-2
            # the second step's norm amplifies the rounding of the first update
            bounds = (half, 5e-4, 2e-2) if "bf16" in name else (1e-5, 1e-6, 1e-4)
            assert (worst[1] <= bounds[0], loss <= bounds[1], norm <= bounds[2]) == (True,) * 3, (
                name,
                worst,
                loss,
                norm,
            )
            # the second step, whose weights an update has moved by bf16's gradients
            later = alone[f"{kind}, single"]["losses"]
            assert found["losses"] == pytest.approx(later, rel=5e-4 if "bf16" in name else 1e-6), name


def test_gradients_are_those_of_transformers_in_float64(tmp_path):
    assert_learns_what_transformers_learns(QUICK, tmp_path, (1, 2))


TEN_STEPS = {"losses": 2e-6, "norms": 2e-5, "gradient": 1e-5}


def test_ten_steps_are_those_of_transformers_in_float64(tmp_path):
    """Windows, scaled embeddings, experts and sinks, with a bound of the losses of 2e-6."""
    kinds, jobs = ("gemma3_text", "gpt_oss"), {}
    for kind in kinds:
        for name in ("fsdp 2", "tp 2, accumulation"):
            jobs[f"{kind}, {name}"] = job(folder_of(kind, tmp_path), "gpus=2", *LAYOUTS[2][name], "steps=10")
    expected = {kind: exact(job(folder_of(kind, tmp_path), *ONE, "steps=10"), CASE) for kind in kinds}
    for name, found in traced(tmp_path, 2, jobs).items():
        own = differences(found, expected[name.split(",")[0]])
        print(name, {one: f"{value:.1e}" for one, value in [*own.items()][:3]}, own["losses"], own["norms"])
        for column, value in own.items():
            assert value <= TEN_STEPS.get(column, TEN_STEPS["gradient"]), (name, column, value)


def test_the_table_is_what_was_proven():
    assert {key: word.partition(" ")[0] for key, (word, _) in table.results(FAMILIES).items()} == table.expected_words()


def test_techniques_go_together():
    found = table.results(("qwen3", "gpt_oss"), table.TOGETHER)
    assert {word for word, _ in found.values()} == {"yes"}, found


def test_number_formats_go_with_other_layouts():
    split = {name: layout for name, layout in table.FORMATS.items() if name.endswith("+ep")}
    others = {name: layout for name, layout in table.FORMATS.items() if name not in split}
    found = table.results(("llama", "qwen3", "gemma3_text", "gpt_oss"), others) | table.results(WITH_EXPERTS, split)
    assert {word for word, _ in found.values()} == {"yes"}, found


def test_float8_learns_what_one_process_learns():
    """With a scale for each row, and with one for a tensor, which FSDP gathers as Float8; norms of heads, biases, sinks."""
    quick = {name: table.LAYOUTS[name] for name in ("float8+tp", "tensorwise")}
    found = table.results(("qwen3", "gpt_oss"), quick)
    assert {word for word, _ in found.values()} == {"yes"}, found


def test_the_page_shows_the_table():
    page = (Path(__file__).parents[3] / "docs/transformers.md").read_text()
    titles, _, *expected = table.lines(table.expected_words())
    rows = [f"{line.rpartition(' |')[0].rpartition(' |')[0]} |" for line in page.splitlines() if line.startswith("|")]
    assert [row for row in rows if row == titles or set(row.split()[1:2]) & set(PROVEN)] == [titles, *expected]


def test_a_proof_compares_one_process_with_transformers_in_float64(tmp_path):
    """The window of a proof hides some tokens, as that of the job does."""
    first = job(folder_of("gemma3_text", tmp_path, sliding_window=64), *FSDP, "gpus=2")
    small = reduced(first, 4)[0]
    pairs = {pair.case.reference: pair for pair in job_pairs(first, small, "fsdp 2")}
    assert pairs.keys() == {"process", "float64"}
    assert (pairs["float64"].job.gpus, json.loads(small.model.content)["sliding_window"]) == (1, 8)


def test_titan_verify_proves_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = folder_of("gemma3_text", tmp_path)
    words = [*JOB, f"model.path={folder}", "parallelism=fsdp", "gpus=2", "data.local_batch=4", "precision=bf16"]
    assert cli.main(["verify", *words]) == 0
    (proof,) = tmp_path.glob("runs/_proofs/*/proof.json")
    found = json.loads(proof.read_text())
    assert [one["passed"] for one in found["reduced"][0]["proofs"]] == [True] * 3
    assert (found["resume"]["passed"], found["export"]["passed"]) == (True, True)


PLANNED = (
    "hardware=h100",
    "precision=bf16",
    "parallelism=fsdp",
    "gpus=8",
    "data.local_batch=2",
    "data.global_batch=16",
)


def test_plan_counts_what_blocks_keep(tmp_path):
    """Live memory by formula is that of a step in the fake world, for blocks unlike ours: four norms, two kinds, in float32."""
    folder = folder_of(
        "gemma3_text", tmp_path, num_hidden_layers=6, hidden_size=512, intermediate_size=2048, layer_types=None
    )
    found = proof(job(folder, *PLANNED, "data.seq_len=128"))
    assert found["live_by_formula"] == pytest.approx(found["live"], rel=0.1)


@pytest.mark.parametrize("split", [(), ("parallelism.tp=2", TP)], ids=["fsdp", "tp"])
def test_experts_are_not_planned(split, tmp_path):
    """Neither where activations are counted nor where they are those of a decoder."""
    with pytest.raises(NotPredictable, match="experts of a model_type=mixtral"):
        predict(job(folder_of("mixtral", tmp_path), *PLANNED, *split))


def test_every_family_has_transformers_gradients(tmp_path):
    assert_learns_what_transformers_learns(FAMILIES, tmp_path, LAYOUTS)


@pytest.mark.parametrize("kind", ["gemma3_text", "qwen3"])
def test_a_folder_is_read_and_written_in_its_own_format(kind, tmp_path, run_job):
    """A run starts from the folder's weights, continues on another layout, and its export is what transformers loads."""
    folder = folder_of(kind, tmp_path)
    model = AutoModelForCausalLM.from_config(library_of(folder), dtype=torch.float32)
    model.save_pretrained(folder)
    words = (f"checkpoint.initial_load_path={folder}", "checkpoint=sync", "steps=4", "checkpoint.interval=2")
    first = job(folder, *words, *ONE, "optimizer.lr=0")
    directory = run_job(first)
    export_hf(newest(directory / "checkpoints"), tmp_path / "same", torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "same", dtype=torch.float32)
    tokens = torch.arange(40).view(2, 20)
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    ours, theirs = (json.loads((place / "config.json").read_text()) for place in (tmp_path / "same", folder))
    assert {name: ours.get(name) for name in ours.keys() & theirs.keys()} == {
        name: theirs[name] for name in ours.keys() & theirs.keys()
    } | {name: ours[name] for name in ("torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id") if name in theirs}
    halves = run_job(job(folder, *words, *ONE))
    whole = run_job.losses(halves)
    relaid = job(folder, *words, "gpus=2", "parallelism=fsdp", "data.local_batch=4")
    target = tmp_path / "relaid"
    (target / "checkpoints").mkdir(parents=True)
    (halves / "checkpoints" / "step-00000002").rename(target / "checkpoints" / "step-00000002")
    continued = run_job.losses(run_job(relaid, target))
    assert {step: loss for step, loss in continued.items() if step > 2} == pytest.approx(
        {step: loss for step, loss in whole.items() if step > 2}, rel=1e-6
    )


def library_of(folder):
    from titan_hydra.recipes.transformers.known import library_config

    return library_config(job(folder, *ONE).model)


def test_initial_weights_have_transformers_distributions(tmp_path):
    """Linears and embeddings have the standard deviation of config.json; gemma's norms begin at 0, as they add 1."""
    config = job(folder_of("gemma3_text", tmp_path, initializer_range=0.1), *ONE).model
    with torch.device("meta"):
        model = build(config, 32)
    model.to_empty(device="cpu")
    init_weights(model, config, seed=1)
    weights = dict(model.named_parameters())
    assert weights["tok_embeddings.weight"].std().item() == pytest.approx(0.1, rel=0.02)
    assert weights["layers.0.mlp.gate_proj.weight"].std().item() == pytest.approx(0.1, rel=0.05)
    assert weights["norm.weight"].abs().max() == 0
    assert all(buffer.isfinite().all() for buffer in model.buffers())


def test_the_frozen_job_does_not_need_the_folder(tmp_path):
    """What a config.json says is in the run; the folder's name, a token's id and the library's version are not."""
    folder = folder_of("llama", tmp_path)
    first = job(folder, *ONE)
    other = folder_of("llama", tmp_path / "other", eos_token_id=5, transformers_version="9", torch_dtype="bfloat16")
    assert identity(job(other, *ONE)) == identity(first)
    assert identity(job(folder_of("llama", tmp_path, rms_norm_eps=1e-3), *ONE)) != identity(first)
    (folder / "config.json").unlink()
    with torch.device("meta"):
        assert len(build(first.model, 32).layers) == 2
    assert (first.model.n_kv_heads, first.model.vocab_size, first.model.dim) == (2, 256, 64)


def test_keys_replace_what_config_json_says(tmp_path):
    """A model of another depth keeps each of its kinds of blocks."""
    model = job(folder_of("gemma3_text", tmp_path, num_hidden_layers=6, layer_types=["sliding_attention"] * 5 + ["full_attention"]), *ONE,
                "model.n_layers=2", "model.vocab_size=300").model  # fmt: skip
    with torch.device("meta"):
        built = build(model, 32)
    assert built.tok_embeddings.weight.shape[0] == 300
    assert [block.self_attn.is_sliding for block in built.layers.values()] == [True, False]


@pytest.mark.parametrize(
    ("kind", "changed", "words", "key", "part"),
    [
        ("llama", {}, ("parallelism=tp", "gpus=2"), "parallelism.sequence_parallel", "nearest legal: false"),
        ("llama", {}, ("parallelism=tp", "parallelism.tp=4", "gpus=4", TP), "parallelism.tp", "nearest legal: 2"),
        ("granite", {}, ("parallelism=tp", "gpus=2", TP), "parallelism.tp", "proven for llama, qwen2"),
        ("granite", {}, ("data.document_mask=true",), "data.document_mask", "nearest legal: false"),
        ("llama", {}, ("parallelism=tp", "gpus=2", TP, *table.MXFP8), "parallelism.tp", "nearest legal: 1"),
        ("llama", {}, ("parallelism=tp", "gpus=2", TP, *table.FUSED), "precision.kernels", "nearest legal: torchao"),
        ("llama", {}, ("adapter=lora", *table.FLOAT8), "precision.converter", "nearest legal: null"),
        ("llama", {}, ("adapter=lora", *table.MXFP8), "precision.converter", "nearest legal: null"),
        (
            "llama",
            {},
            ("precision=nvfp4", "precision.emulate=true"),
            "precision.converter",
            "one of float8, mxfp8, null",
        ),
        ("llama", {}, ("parallelism=cp", "gpus=2"), "parallelism.cp_rotate", "nearest legal: ulysses"),
        ("granite", {}, (*CP, "gpus=2"), "parallelism.cp", "nearest legal: 1"),
        ("llama", {}, (*CP, "gpus=4", "parallelism.cp=4"), "parallelism.cp", "nearest legal: 2"),
        ("granite", {}, ("parallelism=pp", "gpus=2"), "parallelism.pp", "proven for llama, qwen2"),
        ("qwen3", {}, ("parallelism=pp", "gpus=2"), "model.tie_embeddings", "nearest legal: false"),
        ("llama", {}, ("parallelism=fsdp_ep", "gpus=2", "parallelism.ep=2"), "parallelism.ep", "nearest legal: 1"),
        ("llama", {}, ("adapter=lora", "adapter.linears=[q]"), "adapter.linears", "[q_proj,k_proj"),
        ("llama", {}, ("model.attention=math",), "model.attention", "nearest legal: auto"),
        ("llama", {}, ("model.rope_theta=1e4",), "model.rope_theta", "nearest legal: null"),
        ("llama", {"attention_dropout": 0.1}, (), "model.path", "attention_dropout=0.1"),
        ("llama", {"model_type": "lama"}, (), "model.path", "one of llama"),
        ("llama", {"model_type": "my_own", "auto_map": {"AutoModel": "x.Y"}}, (), "model.path", "model_type=my_own"),
        ("llama", {"model_type": "vit"}, (), "model.path", "model_type=vit is no causal decoder"),
        ("llama", {"use_bidirectional_attention": True}, (), "model.path", "use_bidirectional_attention=True"),
        ("llama", {"hidden_size": "wide"}, (), "model.path", "hidden_size"),
        ("llama", {}, ("model.path=/nowhere",), "model.path", "config.json"),
    ],
)
def test_refused_in_one_line(kind, changed, words, key, part, tmp_path):
    with pytest.raises(ConfigError) as error:
        job(folder_of(kind, tmp_path, **changed), *ONE, *words)
    lines = str(error.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"{key}=")
    assert part in lines[0]


def test_other_structures_and_heads_are_refused(tmp_path):
    """A model with other parts than a decoder's is refused before a start; a head with a soft cap computes no loss in
    chunks.
    """
    folder = folder_of("gpt2", tmp_path, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    faults = check(freeze(compose_unchecked(*JOB, f"model.path={folder}", *ONE)))
    assert [(fault.key, fault.code) for fault in faults] == [("model.path", "family_takes_its_own_keys")]
    assert "is not an embedding, one list of 2 blocks" in faults[0].reason
    capped = job(folder_of("gemma2", tmp_path), *ONE, *CHUNKS)
    with torch.device("meta"):
        model = build(capped.model, 32)
    with pytest.raises(ConfigError, match="cross_entropy"):
        loss_head.convert(model, capped.loss)


@pytest.mark.parametrize("kind", FAMILIES)
def test_documents_are_separated_as_in_runs_of_their_own(kind, tmp_path):
    """gpt-oss gives the positions to its rotary embedding alone, so that its documents would see each other."""
    config = job(folder_of(kind, tmp_path), *ONE).model
    with torch.device("meta"):
        model = build(config, 12)
    model.to_empty(device="cpu")
    init_weights(model, config, seed=1)
    tokens = torch.arange(12).view(1, 12)
    packed = model(tokens, torch.tensor([[*range(5), *range(7)]]))
    alone = torch.cat([model(tokens[:, :5]), model(tokens[:, 5:])], 1)
    assert torch.allclose(packed, alone, atol=1e-5)


def test_nobody_else_imports_transformers():
    """Neither a launcher nor a rank of another model imports it."""
    script = (
        "import sys; from titan_hydra.experiments.compose.compose import compose_job; from titan_hydra.core import models;"
        "import titan_hydra.core.train.loop; j = compose_job('debug=tiny'); import torch;"
        "torch.set_default_device('meta'); models.build(j.model, 8); sys.exit('transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_the_record_survives_config_json(tmp_path):
    """A frozen job is written and read again as it is."""
    from titan_hydra.core.job.config import from_dict
    from titan_hydra.core.job.config.schema import Job

    first = job(folder_of("gpt_oss", tmp_path), *ONE)
    assert to_dict(freeze(from_dict(Job, json.loads(json.dumps(to_dict(first)))))) == to_dict(first)
