"""Rectified flow on captioned images is the same on every layout, with and without a resume, and equals a separate
float64 formula.
"""

import numpy as np
import pytest
import torch

from tests.core.checkpoint.steps import cut_back, tensors
from titan_hydra.core import data, models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.registry import OBJECTIVES
from titan_hydra.core.job.run.checkpoints import newest
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.train.objectives import build_objective
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.verify.case import case, in_bf16
from titan_hydra.instruments.verify.verify import reference_of, verify
from titan_hydra.recipes.flux import images
from titan_hydra.recipes.flux.diffusion import as_latents, as_tokens

AWAKE = '''
"""FLUX whose modulations and output do not begin at 0, so that the first step gives every parameter a gradient."""
from dataclasses import dataclass, replace

from titan_hydra.core.models import family_of, register
from titan_hydra.recipes.flux import FluxConfig


@dataclass
class Awake(FluxConfig):
    pass


register(replace(family_of(FluxConfig(family="flux")), name="awake", config=Awake, model="awake_on_ranks:AwakeFlux"))
'''
AWAKE_ON_RANKS = """
from titan_hydra.recipes.flux.model import Flux
from titan_hydra.core.models.init import Normal


class AwakeFlux(Flux):
    @staticmethod
    def initial_distribution(fqn, config):
        plain = Flux.initial_distribution(fqn, config)
        return Normal(0.1) if plain == 0.0 else plain
"""
SMALL = (
    "model=flux_debug",
    "data=synthetic_images",
    "data.caption_dropout=0.4",
    "data.seq_len=24",
    "model.n_kv_heads=8",
    "model.double_layers=2",
    "model.rope_first=0",
    "train.imports=[awake]",
    "model.family=awake",
)
LAYOUTS = {
    "accumulation 2": (1, "parallelism=single", "data.local_batch=8"),
    "fsdp 4": (4, "parallelism=fsdp", "data.local_batch=4"),
    "hsdp 2x2": (4, "parallelism=hsdp", "parallelism.dp_replicate=2", "parallelism.dp_shard=2", "data.local_batch=2"),
    "cp 2": (2, "parallelism=cp", "data.local_batch=16"),
    "cp 2, in order": (2, "parallelism=cp", "parallelism.cp_load_balance=false", "data.local_batch=8"),
    "cp 2, alltoall": (2, "parallelism=cp", "parallelism.cp_rotate=alltoall", "data.local_batch=16"),
    "cp 2, ulysses": (2, "parallelism=cp", "parallelism.cp_rotate=ulysses", "data.local_batch=16"),
    "fsdp 2, cp 2": (4, "parallelism=fsdp_cp", "parallelism.dp_shard=2", "parallelism.cp=2", "data.local_batch=8"),
    "fsdp 2, full ac": (2, "parallelism=fsdp", "ac=full", "data.local_batch=8"),
    "fsdp 2, op ac": (2, "parallelism=fsdp", "ac=op", "data.local_batch=8"),
    "simple_fsdp 2": (2, "parallelism=fsdp", "parallelism.backend=simple_fsdp", "data.local_batch=8"),
    "fsdp 2, compiled": (2, "parallelism=fsdp", "compile=block", "compile.backend=aot_eager", "data.local_batch=8"),
}


@pytest.fixture(scope="module")
def awake(user_modules):
    """Put modules with the model family AWAKE on Python's path."""
    user_modules({"awake.py": AWAKE, "awake_on_ranks.py": AWAKE_ON_RANKS})


def test_every_layout_learns_what_one_process_learns(awake):
    cases = [case(name, ranks, *words, base=SMALL) for name, (ranks, *words) in LAYOUTS.items()]
    for outcome in verify(cases, steps=3):
        print(outcome)
        assert outcome.passed, outcome


@pytest.mark.parametrize("slow", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layouts_learn_the_same_in_bf16(awake, slow):
    layouts = (("fsdp 2", 2, "fsdp"), ("cp 2", 2, "cp"), ("hsdp 4", 4, "hsdp"))
    cases = in_bf16("flux", *SMALL, "model.double_layers=1", layouts=layouts, loss=5e-4)
    for outcome in verify([one for one in cases if one.slow is slow], steps=3):
        assert outcome.passed, outcome


def test_every_parameter_has_a_gradient_and_the_loss_is_that_of_float64(awake):
    job = reference_of(case("", 1, base=SMALL), steps=1)
    model, batch, objective = (
        models.build(job.model, job.data.seq_len),
        data.build(job, 0, 1).next(),
        build_objective(job),
    )
    init_weights(model, job.model, job.seed)
    first, others = objective.inputs(batch.tensors)
    loss = objective.loss(model(first, **others), batch.tensors) / objective.count(batch.tensors)
    loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in model.parameters())
    clean, noise, time = (batch[name].double() for name in ("latents", "noise", "time"))
    with torch.no_grad():
        mixed = (clean.mT * (1 - time).view(-1, 1, 1) + noise.mT * time.view(-1, 1, 1)).mT
        velocity = model.double()(mixed, batch["text"].double(), batch["pooled"].double(), time, batch["positions"])
    expected = ((clean + velocity - noise) ** 2).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_attention_is_not_causal(awake):
    """The first token of the text sees the last token of the image, and the reverse."""
    job = reference_of(case("", 1, base=SMALL), steps=1)
    model, batch = models.build(job.model, job.data.seq_len), data.build(job, 0, 1).next()
    init_weights(model, job.model, job.seed)
    first, others = build_objective(job).inputs(batch.tensors)
    with torch.no_grad():
        plain = model(first, **others)
        last = first.clone()
        last[:, -1] += 1
        assert ((model(last, **others) - plain)[:, 0].abs() > 1e-4).any()
        others["text"] = others["text"] + torch.nn.functional.one_hot(torch.tensor(0), job.model.text_len)[:, None]
        assert ((model(first, **others) - plain).abs().amax(-1) > 1e-4).all()


def test_a_resumed_run_goes_on_bitwise(run_job, tmp_path):
    job = compose_job(
        "experiment=flux_laptop",
        "metrics.log_every=1",
        "steps=6",
        "data.global_batch=16",
        "checkpoint.interval=3",
        "checkpoint.keep_latest_k=0",
        "data.local_batch=4",
        "gpus=2",
        "validation.interval=3",
        "validation.steps=1",
    )
    whole = run_job(job)
    same = run_job(job, cut_back(whole, 3, tmp_path / "same"))
    assert run_job.losses(same) == run_job.losses(whole)
    assert run_job.losses(same, "validation_loss") == run_job.losses(whole, "validation_loss")
    before, after = tensors(newest(whole / "checkpoints")), tensors(newest(same / "checkpoints"))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_the_captioned_images_are_learned(run_job):
    losses = run_job.losses(
        run_job(compose_job("experiment=flux_laptop", "gpus=1", "steps=40", "validation.interval=40"))
    )
    assert losses[40] < 0.5 * losses[1]


def test_draws_follow_from_seed_and_sample_alone():
    job = compose_job("experiment=flux_laptop", "gpus=1", "data.local_batch=4", "data.global_batch=8")
    whole = [data.build(job, 0, 1).next() for _ in range(2)]
    halves = [data.build(job, rank, 2).next() for rank in range(2)]
    for name in ("noise", "time", "text", "pooled", "latents"):
        assert torch.equal(whole[0][name], whole[1][name])
        assert torch.equal(whole[0][name], torch.cat([half[name] for half in halves])), name
    loader = data.build(job, 0, 1)
    first, second = loader.next(), loader.next()
    assert not torch.equal(first["time"], second["time"]) and len(first["time"].unique()) == 8
    job.seed += 1
    assert not torch.equal(data.build(job, 0, 1).next()["noise"], first["noise"])


def test_captions_are_left_out_as_often_as_asked_and_for_each_encoder_apart():
    job = compose_job("experiment=flux_laptop", "gpus=1", "data.caption_dropout=0.3", "data.local_batch=2000")
    batch, empty = data.build(job, 0, 1).next(), images.spoken("", job.model)
    left = [
        (batch["text"] == torch.from_numpy(empty.text)).flatten(1).all(1),
        (batch["pooled"] == torch.from_numpy(empty.pooled)).all(1),
    ]
    rates = [mask.double().mean().item() for mask in (*left, left[0] & left[1])]
    assert rates == pytest.approx([0.3, 0.3, 0.09], abs=0.04)
    assert batch["time"].mean().item() == pytest.approx(0.5, abs=0.03)


def test_a_validation_is_at_fixed_times_with_whole_captions():
    job = compose_job("experiment=flux_laptop", "gpus=1", "data.caption_dropout=0.9", "data.local_batch=16")
    loader = data.build(job, 0, 1, "validation")
    batch = loader.next()
    assert batch["time"].tolist() == [(place + 0.5) / 8 for place in range(8)] * 2
    empty = torch.from_numpy(images.spoken("", job.model).pooled)
    assert not (batch["pooled"] == empty).all(1).any()


def test_tokens_are_squares_of_latents_and_back():
    latents = torch.arange(2 * 3 * 6 * 6).view(2, 3, 6, 6)
    tokens = as_tokens(latents)
    assert torch.equal(tokens[1, 4].view(3, 2, 2), latents[1, :, 2:4, 2:4]) and torch.equal(as_latents(tokens), latents)


def test_synthetic_images_survive_their_autoencoder():
    for caption in images.CAPTIONS:
        pixels = images.picture(caption, 64, 0)
        again = images.to_pixels(images.to_cells(pixels, 192))
        assert np.allclose(again, pixels, atol=1e-5)
        assert abs(images.to_pixels(images.to_cells(pixels, 16)) - pixels).mean() < 0.15


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["objective=language"],
            "objective.name=language: makes tokens of samples, for model.family=llama3 or qwen3 or qwen3_moe or deepseek_v3 "
            "or transformers, and model.family=flux takes latents; nearest legal: diffusion",
        ),
        (
            ["model=llama3_debug"],
            "objective.name=diffusion: makes latents of samples, for model.family=flux, and model.family=llama3 takes tokens; "
            f"one of {', '.join(name for name, record in OBJECTIVES.items() if record.makes == 'tokens')}",
        ),
        (["parallelism=tp"], "parallelism.tp=2: family flux has no tensor-parallel sharding; nearest legal: 1"),
        (["parallelism=pp"], "parallelism.pp=2: family flux cannot be cut into stages; nearest legal: 1"),
        (
            ["data.seq_len=25"],
            "data.seq_len=25: model.text_len=8 tokens of text leave 17 for the image, not a square number; nearest legal: 24 or 33",
        ),
        (
            ["data=embedded", "objective=diffusion"],
            "data.name=embedded: objective=diffusion needs latents and noise and time and text and pooled of each sample, "
            "which this source does not give; one of encoded_images, image_files, synthetic_images",
        ),
        (
            ["model.rope_first=10"],
            "model.rope_first=10: must be even, and the rest of a head's width 32 divide by 4; nearest legal: 8 or 12",
        ),
        (["model.double_layers=7"], "model.double_layers=7: the model has 6 blocks; nearest legal: 6"),
        (
            ["parallelism=cp", "model.text_len=9", "data.seq_len=25", "parallelism.cp_rotate=ulysses"],
            "data.seq_len=25: cannot be cut into 2 parts (cp 2, tp 1); nearest legal: 24 or 26",
        ),
        (
            ["parallelism=cp", "model.text_len=9", "data.seq_len=18", "parallelism.cp_rotate=ulysses"],
            "parallelism.cp=2: 9 tokens of text cannot be cut into 2 parts\n"
            "parallelism.cp=2: 9 tokens of the image cannot be cut into 2 parts",
        ),
        (
            ["adapter=lora"],
            "adapter.name=lora: model.family=flux has blocks of two kinds, which get no adapters; nearest legal: none",
        ),
        (["data.caption_dropout=1.5"], "data.caption_dropout=1.5: must be from 0 to 1; nearest legal: 1"),
    ],
)
def test_what_cannot_be_is_one_line(words, line):
    with pytest.raises(ConfigError) as error:
        compose_job("experiment=flux_laptop", *words)
    assert str(error.value).replace(" or awake", "") == line  # a family that other tests of this file register
