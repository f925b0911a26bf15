"""Test images with text: the tower against a plain one that reads each image alone, layouts, ranks without images,
tars.
"""

import io
import json
import tarfile

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from titan_hydra.core import data, models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data import tokenizer
from titan_hydra.core.job.config.registry import OBJECTIVES
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.train.objectives import build_objective
from titan_hydra.core.train.objectives.language import IGNORED
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.verify.case import case
from titan_hydra.instruments.verify.verify import verify
from titan_hydra.recipes.image_text.images import cells_of
from titan_hydra.recipes.image_text.model import resized

BASE = ("data=synthetic_image_text", "data.seq_len=96", "objective.patches=64", "objective.image_patches=40")
SMALL = ("model.vocab_size=4096", "model.dim=64", "model.n_layers=4", "model.n_heads=8", "model.n_kv_heads=4")
WHOLE = "data.document_mask=false"
# objectives that a model of text supports
OF_TEXT = ", ".join(name for name, record in OBJECTIVES.items() if record.makes == "tokens")
LAYOUTS = {
    "accumulation 2": (1, "parallelism=single", "data.local_batch=8"),
    "fsdp 4": (4, "parallelism=fsdp", "data.local_batch=2"),
    "tp 2": (2, "parallelism=tp", "data.local_batch=16"),
    "tp 2, sequence parallel off": (2, "parallelism=tp", "parallelism.sequence_parallel=off", "data.local_batch=16"),
    "fsdp 2, tp 2": (4, "parallelism=fsdp_tp", "parallelism.tp=2", "data.local_batch=4"),
    "pp 2": (2, "parallelism=pp", "data.local_batch=16"),
    "pp 2, zbv": (2, "parallelism=pp", "pp_schedule=zbv", "data.local_batch=16"),
    "cp 2, ulysses": (2, "parallelism=cp", "parallelism.cp_rotate=ulysses", "data.local_batch=16"),
    "fused loss, ac": (2, "parallelism=fsdp", "data.local_batch=4", "loss=linear_cross_entropy", "ac=full"),
    "compiled": (2, "parallelism=fsdp", "data.local_batch=4", "compile=block", "compile.backend=aot_eager"),
}


def prove(base, layouts):
    for outcome in verify(
        [case(name, ranks, *words, base=base, gradients=2e-5) for name, (ranks, *words) in layouts.items()], steps=2
    ):
        assert outcome.passed, outcome


def test_every_layout_learns_what_one_process_learns():
    prove(("model=llama3_vision_debug", *SMALL, *BASE), LAYOUTS)


def test_other_decoders_and_rings_learn_it_too():
    layouts = {
        "fsdp 2": (2, "parallelism=fsdp", "data.local_batch=4"),
        "tp 2": (2, "parallelism=tp", "data.local_batch=16"),
        "cp 2": (2, "parallelism=cp", "data.local_batch=16"),
    }
    prove(("model=qwen3_vision_debug", *SMALL, "model.head_dim=16", *BASE, WHOLE), layouts)


def tar(file, members):
    """Write a tar with these members, by name."""
    with tarfile.open(file, "w") as out:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            out.addfile(about, io.BytesIO(content))
    return file


def png(height, width, seed=0):
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "png")
    return out.getvalue()


@pytest.mark.parametrize("parallelism", ["fsdp", "hsdp"])
def test_ranks_without_images_stay_in_the_collectives(tmp_path, parallelism):
    """A sample has one document. The longest documents, which have images, come first. In the first step half of the
    ranks have no image, and in the second step no rank has one.
    """
    text = "a b c d e f g h i j k l m n o p q r s t u v w x y z " * 3
    half = {f"{number:03}.json": json.dumps({"parts": [{"text": text}]}).encode() for number in range(8, 32)}
    images = {
        f"{number:03}.{kind}": content
        for number in range(8)
        for kind, content in (("png", png(16, 24, number)), ("txt", text.encode()))
    }
    file = tar(tmp_path / "images.tar", images | half)
    base = (
        "data=image_text",
        f"data.path={file}",
        "data.shuffle=false",
        "data.seq_len=128",
        "objective.patches=32",
        "objective.image_patches=32",
    )
    job = compose_job(
        "debug=tiny",
        "model=llama3_vision_debug",
        *base,
        "data.local_batch=4",
        "data.global_batch=16",
        "gpus=4",
        "parallelism=fsdp",
    )
    loaders = [data.build(job, rank, 4) for rank in range(4)]
    found = [[bool((loader.next()["images"] >= 0).any()) for loader in loaders] for _ in range(2)]
    assert found == [[True, True, False, False], [False] * 4]
    prove(
        ("model=llama3_vision_debug", *SMALL, *base),
        {"ranks without": (4, f"parallelism={parallelism}", "data.local_batch=4")},
    )


def plain(tower, vision, pixels):
    """Return what the tower gives for one image alone [height, width, 3], computed step by step as in its paper."""
    side = vision.patch
    rows, columns = pixels.shape[0] // side, pixels.shape[1] // side
    weight = tower.patches.weight.view(-1, side, side, 3).permute(0, 3, 1, 2)
    image = (pixels.double() / 127.5 - 1).permute(2, 0, 1)[None]
    x = F.conv2d(image, weight, tower.patches.bias, stride=side)[0]
    table = tower.positions.weight.view(1, -1, vision.grid, vision.grid)
    x = x + F.interpolate(table, (rows, columns), mode="bilinear", align_corners=False, antialias=True)[0]
    x = x.flatten(1).T
    for block in tower.blocks:
        y = F.layer_norm(x, x.shape[1:], block.attention_norm.weight, block.attention_norm.bias, 1e-6)
        q, k, v = (
            linear(y).view(len(y), vision.n_heads, -1).transpose(0, 1) for linear in (block.wq, block.wk, block.wv)
        )
        scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
        x = x + block.wo((scores @ v).transpose(0, 1).reshape(len(y), -1))
        y = F.layer_norm(x, x.shape[1:], block.ffn_norm.weight, block.ffn_norm.bias, 1e-6)
        x = x + block.w2(F.gelu(block.w1(y), approximate="tanh"))
    x = F.layer_norm(x, x.shape[1:], tower.norm.weight, tower.norm.bias, 1e-6)
    return tower.outer(F.gelu(tower.inner(x), approximate="tanh"))


def test_images_of_any_aspect_are_read_as_by_a_plain_tower_alone(tmp_path):
    sizes = [(8, 40), (32, 12), (4, 4), (20, 20), (12, 36), (40, 8)]
    members = {
        f"{number}.{kind}": content
        for number, size in enumerate(sizes)
        for kind, content in (("png", png(*size, number)), ("txt", b"words"))
    }
    job = compose_job(
        "debug=tiny",
        "model=llama3_vision_debug",
        "model.vision.grid=6",
        "data=image_text",
        "data.shuffle=false",
        f"data.path={tar(tmp_path / 'a.tar', members)}",
        "data.seq_len=96",
        "objective.patches=72",
        "objective.image_patches=72",
        "data.local_batch=1",
    )
    model = models.build(job.model, job.data.seq_len)
    init_weights(model, job.model, 0)
    with torch.no_grad():
        for parameter in model.vision.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.double()
    loader, seen = data.build(job, 0, 1), {}
    while len(seen) < len(sizes):
        batch = loader.next()
        images = {name: batch[name] for name in ("patches", "cells", "images", "places")}
        with torch.no_grad():
            h = model.vision(torch.zeros(*batch["tokens"].shape, job.model.dim, dtype=torch.float64), **images)
        assert not h[batch["places"] < 0].any()
        assert (batch["places"] >= 0).sum() == (batch["images"] >= 0).sum()
        for image in range(int(batch["images"].max()) + 1):
            first = int((batch["images"][0] == image).nonzero()[0])
            rows, columns = batch["cells"][0, first, 2:].tolist()
            inside = (batch["places"][0] >= first) & (batch["places"][0] < first + rows * columns)
            seen[rows * 4, columns * 4] = h[0, inside]
    assert sorted(seen) == sorted(sizes)
    for number, size in enumerate(sizes):
        pixels = torch.from_numpy(np.asarray(Image.open(io.BytesIO(png(*size, number)))).copy())
        with torch.no_grad():
            expected = plain(model.vision, job.model.vision, pixels)
        torch.testing.assert_close(seen[size], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["llama3_vision_debug", "qwen3_vision_debug", "llama3_8b_vision"])
def test_the_number_of_parameters_is_known_without_torch(name):
    job = compose_job(f"model={name}", "objective=image_text", "data=synthetic_image_text", "cluster=slurm")
    with torch.device("meta"):
        model = models.family_of(job.model).part("model")(job.model, 128)
    assert models.family_of(job.model).parameters(job.model) == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_a_table_is_resized_as_torch_does():
    for number in (1, 3, 5, 8, 16, 37):
        ours = resized(torch.arange(number), torch.tensor(number), 8) @ torch.eye(8)
        theirs = F.interpolate(
            torch.eye(8)[None, None], (number, 8), mode="bilinear", align_corners=False, antialias=True
        )[0, 0]
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("size", "cells"),
    [
        ((64, 64), (4, 4)),
        ((64, 200), (4, 12)),
        ((1600, 1600), (8, 8)),
        ((3200, 800), (16, 4)),
        ((1, 5000), (1, 64)),
        ((5000, 1), (64, 1)),
        ((7, 7), (1, 1)),
    ],
)
def test_an_image_keeps_its_aspect_within_the_budget(size, cells):
    assert cells_of(*size, side=16, most=64) == cells


def test_documents_of_texts_and_images_in_turn(tmp_path):
    parts = [{"text": "one"}, {"image": "0.png"}, {"text": "two"}, {"image": "1.png"}]
    members = {
        "a/x.json": json.dumps({"parts": parts}).encode(),
        "a/x.0.png": png(8, 12),
        "a/x.1.png": png(4, 8, 1),
        "a/y.txt": b"three",
        "a/y.PNG": png(4, 4),
    }
    job = compose_job(
        "debug=tiny",
        "model=qwen3_vision_debug",
        "data=image_text",
        f"data.path={tar(tmp_path / 'a.tar', members)}",
        "data.local_batch=1",
        "data.seq_len=64",
        "objective.patches=16",
        "objective.image_patches=16",
        "data.shuffle=false",
    )
    batch, words = data.build(job, 0, 1).next(), tokenizer.load(job.tokenizer)
    places, tokens = batch["places"][0], batch["tokens"][0]
    one, two, three = (words.encode(text) for text in ("one", "two", "three"))
    bos, eos = [words.bos_id], [words.eos_id]
    assert tokens[: len(one) + len(two) + len(three) + 9 + 4].tolist() == (
        bos + one + eos * 6 + two + eos * 2 + eos + bos + eos * 1 + three + eos
    )
    first, second = 1 + len(one), 1 + len(one) + 6 + len(two)
    assert places[first : first + 6].tolist() == [*range(6)] and places[second : second + 2].tolist() == [6, 7]
    assert batch["images"][0].tolist() == [0] * 6 + [1] * 2 + [2] + [-1] * 7
    assert batch["cells"][0, :8].tolist() == [[row, column, 2, 3] for row in range(2) for column in range(3)] + [
        [0, 0, 1, 2],
        [0, 1, 1, 2],
    ]
    asked = batch["labels"][0]
    assert asked[asked != IGNORED].tolist() == one + two + eos + three + eos


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"x.png": png(4, 4)}, "{file}:/x: neither an image with .txt nor a .json with 'parts', but png"),
        ({"x.json": b"{}"}, "{file}:/x: its .json has no list 'parts'"),
        (
            {"x.json": b'{"parts": [{"image": "9.png"}]}'},
            "{file}:/x: its part {{'image': '9.png'}} is neither a text nor one of its images",
        ),
        ({"x.txt": b"a", "x.png": b"no image"}, "{file}:/x: cannot identify image file"),
        ({"x.txt": b"a", "x.png": png(40, 40)[:900]}, "{file}:/x: cannot be decoded: "),
    ],
)
def test_what_is_no_sample_is_one_line(tmp_path, members, reason):
    file = tar(tmp_path / "a.tar", members)
    job = compose_job(
        "debug=tiny", "model=qwen3_vision_debug", "data=image_text", f"data.path={file}", "data.seq_len=256"
    )
    with pytest.raises(ConfigError) as error:
        data.build(job, 0, 1).next()
    assert str(error.value).startswith(reason.format(file=file)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["model=llama3_debug"],
            "objective.name=image_text: makes text with images of samples, for model.family=llama3_vision or qwen3_vision, "
            f"and model.family=llama3 takes tokens; one of {OF_TEXT}",
        ),
        (
            ["data=synthetic", "objective=language", WHOLE],
            "objective.name=language: makes tokens of samples, for model.family=llama3 or qwen3 or qwen3_moe or deepseek_v3 "
            "or transformers, and model.family=llama3_vision takes text with images; nearest legal: image_text",
        ),
        (
            ["objective.image_patches=65", "objective.patches=64"],
            "objective.image_patches=65: more than objective.patches=64 of a sample; nearest legal: 64",
        ),
        (
            ["precision=float8_emulate", "parallelism.backend=simple_fsdp"],
            "precision.converter=float8: the tower of model.family=llama3_vision has no number format; nearest legal: null\n"
            "parallelism.backend=simple_fsdp: the tower of model.family=llama3_vision can only be sharded by FSDP2; nearest legal: fsdp2",
        ),
        (
            ["adapter=lora"],
            "adapter.name=lora: the tower of model.family=llama3_vision has no adapters; nearest legal: none",
        ),
        (["model.vision.n_heads=5"], "model.vision.n_heads=5: model.vision.dim=64 cannot be split over them"),
    ],
)
def test_what_does_not_go_together_is_one_line(words, line):
    words = {
        word.partition("=")[0]: word
        for word in ("debug=tiny", "model=llama3_vision_debug", "data=synthetic_image_text", *words)
    }
    with pytest.raises(ConfigError) as error:
        compose_job(*words.values())
    assert str(error.value) == line


def test_an_example_has_the_shapes_of_real_batches():
    job = compose_job("debug=tiny", "model=llama3_vision_debug", "data=synthetic_image_text")
    real, example = data.build(job, 0, 1).next(), build_objective(job).example(job.data.global_batch)
    shapes = [
        {name: (tensor.shape[: 1 if name == "ends" else None], tensor.dtype) for name, tensor in batch.tensors.items()}
        for batch in (real, example)
    ]
    assert shapes[0] == shapes[1]


def test_captions_are_learned_from_the_images(tiny, run_job):
    """The captions name the two colours of a rectangle. With the images, their loss falls below that of guessing the
    colours.
    """
    words = (
        "data=synthetic_image_text",
        "model=llama3_vision_debug",
        "steps=60",
        "optimizer.lr=3e-3",
        "lr_scheduler.warmup_steps=5",
        "data.seq_len=128",
        "data.local_batch=8",
    )
    losses = run_job.losses(run_job(tiny(*words)))
    assert losses[1] > 7 and losses[60] < 1.0


def test_a_damaged_image_is_black_where_that_is_allowed(tmp_path):
    members = {"x.txt": b"a", "x.png": png(40, 40)[:900], "y.txt": b"b", "y.png": png(8, 8)}
    job = compose_job(
        "debug=tiny",
        "model=qwen3_vision_debug",
        "data=image_text",
        f"data.path={tar(tmp_path / 'a.tar', members)}",
        "data.seq_len=256",
        "data.max_bad_rows=1",
    )
    loader = data.build(job, 0, 1)
    batch = loader.next()
    assert (
        not batch["patches"][0, :100].any()
        and batch["patches"][0, 100:104].any()
        and (batch["places"][0] >= 0).sum() == 104
    )
    assert [*loader.news().values()] == [f"{tmp_path}/a.tar:/x: cannot be decoded: image file is truncated"]


def test_a_camera_that_was_turned_is_turned_back(tmp_path):
    exif, out = Image.Exif(), io.BytesIO()
    exif[274] = 6  # the image must be turned by 90 degrees to be seen upright
    pixels = np.zeros((8, 40, 3), dtype=np.uint8)
    pixels[:, 20:] = 255
    Image.fromarray(pixels).save(out, "jpeg", exif=exif, quality=95)
    members = {"x.txt": b"a", "x.jpg": out.getvalue()}
    job = compose_job(
        "debug=tiny", "model=qwen3_vision_debug", "data=image_text", f"data.path={tar(tmp_path / 'a.tar', members)}"
    )
    batch = data.build(job, 0, 1).next()
    assert batch["cells"][0, 0].tolist() == [0, 0, 10, 2]
    assert batch["patches"][0, :10].float().mean() < 5 and batch["patches"][0, 10:20].float().mean() > 250
