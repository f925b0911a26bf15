"""Captioned images from files to a run and back to files, encoded before the run or during it, with tiny random
encoders.
"""

import json

import pytest
import torch
from PIL import Image

from tests.recipes.flux.folders import write_encoders
from titan_hydra import cli
from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.recipes.flux.images import CAPTIONS, picture
from titan_hydra.recipes.flux.sample import as_bytes

MODEL = (
    "model=flux_debug",
    "model.channels=4",
    "model.text_dim=24",
    "model.pooled_dim=24",
    "data.seq_len=24",
    "gpus=1",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with encoders/ with random weights, and images.jsonl with nine images of two sizes."""
    folder = tmp_path_factory.mktemp("images")
    write_encoders(encoders := folder / "encoders")
    rows = []
    for number, caption in enumerate(CAPTIONS[:9]):
        pixels = as_bytes(picture(caption, 32, 0))
        Image.fromarray(pixels if number % 2 else pixels[:, 4:28]).save(folder / f"{number}.png")
        rows.append({"image": f"{number}.png", "caption": caption})
    (folder / "images.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [
        "data",
        "encode-images",
        str(folder / "images.jsonl"),
        "--encoders",
        str(encoders),
        "--size",
        "16",
        "--text-len",
        "8",
    ]
    for dtype in ("float32", "bfloat16"):
        assert cli.main([*words, str(folder / dtype), "--batch", "4", "--per-file", "5", "--dtype", dtype]) == 0
    return folder


def encoded(folder, *words):
    return compose_job("data=encoded_images", *MODEL, "data.local_batch=9", f"data.path={folder}", *words)


def test_encoded_before_the_run_is_encoded_in_it(folder):
    before = data.build(encoded(folder / "float32"), 0, 1).next()
    during = data.build(
        compose_job(
            "data=image_files",
            *MODEL,
            "data.local_batch=9",
            f"data.path={folder / 'images.jsonl'}",
            f"data.encoders={folder / 'encoders'}",
        ),
        0,
        1,
    ).next()
    for name, tensor in before.tensors.items():
        torch.testing.assert_close(tensor, during[name], rtol=1e-4, atol=1e-5)
    assert torch.equal(before["noise"], during["noise"]) and len(before["pooled"].unique(dim=0)) > 2
    coarse = data.build(encoded(folder / "bfloat16"), 0, 1).next()
    torch.testing.assert_close(coarse["latents"], before["latents"], rtol=2e-2, atol=2e-2)


def test_every_image_comes_once_an_epoch(folder):
    loader = data.build(encoded(folder / "float32", "data.caption_dropout=0"), 0, 1)
    first, second = loader.next(), loader.next()
    assert len(first["pooled"].unique(dim=0)) == 9
    assert not torch.equal(first["pooled"], second["pooled"])
    assert torch.equal(first["pooled"].sort(0).values, second["pooled"].sort(0).values)


def test_a_run_on_them_draws_with_the_same_encoders(folder, run_job, tmp_path, capsys):
    run = run_job(
        encoded(
            folder / "bfloat16",
            "steps=2",
            "validation=on",
            f"data.validation_path={folder / 'float32'}",
            "lr_scheduler.warmup_steps=1",
            "validation.steps=1",
        )
    )
    words = ["generate", "images", str(run), "--prompt", "a red circle", "--steps", "2", "--to", str(tmp_path)]
    assert cli.main(words) == 2
    assert "name the folder with --encoders" in capsys.readouterr().err
    assert cli.main([*words, "--encoders", str(folder / "encoders")]) == 0
    with Image.open(tmp_path / "01-a-red-circle.png") as image:
        assert image.size == (16, 16)


def test_what_does_not_fit_is_one_line(folder, tmp_path, capsys):
    for words, line in (
        (
            ["data.path=" + str(tmp_path)],
            f"data.path={tmp_path}: has no complete images.json; `titan data encode-images` writes it last",
        ),
        (["validation=on"], "data.validation_path=null: validation=on with data=encoded_images needs it"),
        (["data.path=null"], "data.path=null: data=encoded_images needs it"),
        (
            ["model.text_len=20", "data.seq_len=36"],
            f"data.path={folder / 'float32'}: text of an image is [8, 24]; data.seq_len and the model need [20, 24]",
        ),
    ):
        with pytest.raises(ConfigError) as error:
            encoded(folder / "float32", *words)
        assert str(error.value) == line
    (tmp_path / "none.jsonl").write_text('{"image": "none.png"}')
    with pytest.raises(ConfigError) as error:
        compose_job("data=image_files", *MODEL, f"data.path={tmp_path / 'none.jsonl'}")
    assert str(error.value) == "data.encoders=null: data=image_files needs it"
    words = [
        "data",
        "encode-images",
        str(tmp_path / "none.jsonl"),
        str(tmp_path / "out"),
        "--encoders",
        str(folder / "encoders"),
    ]
    assert cli.main(words) == 2 and "none.jsonl:1: is not" in capsys.readouterr().err
    (tmp_path / "none.jsonl").write_text('{"image": "none.png", "caption": "a"}')
    assert cli.main(words) == 2 and "none.png is not there" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "none.png").write_text("no image")
    assert cli.main(words) == 2 and "none.png: cannot be read as an image" in capsys.readouterr().err
    assert not (tmp_path / "out/images.json").exists()
