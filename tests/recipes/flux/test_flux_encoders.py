"""Test FLUX's text encoders and autoencoder, which come from transformers and diffusers: what they are given, what is
made of their results, and the folders that are refused. Weights are tiny and random.
"""

import json
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.recipes.flux.folders import BEGIN, END, MERGES, ROOM, T5_WORDS, WIDTH, write_encoders
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.recipes.flux import images
from titan_hydra.recipes.flux.encoders import Encoders

CPU = torch.device("cpu")
RED, CAT = 191, 193  # what CLIP's tokenizer makes of "red" and "cat"
TEXTS = ["a red cat", "Red  CAT", ""]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    write_encoders(folder := tmp_path_factory.mktemp("encoders"))
    return folder


@pytest.fixture(scope="module")
def tools(written):
    return Encoders(written, CPU)


@pytest.fixture
def folder(written, tmp_path):
    """Return a copy of the encoders' folder, which a test may damage."""
    return shutil.copytree(written, tmp_path / "encoders")


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Fail any connection: what is not in the folder must not be looked for elsewhere."""

    def refused(*_):
        raise AssertionError("a connection")

    monkeypatch.setattr(socket, "getaddrinfo", refused)
    monkeypatch.setattr(socket.socket, "connect", refused)


def test_every_token_of_a_caption_is_embedded_and_so_is_its_padding(tools):
    text, pooled = tools.captions(TEXTS, 8)
    assert text.shape == (3, 8, WIDTH) and pooled.shape == (3, WIDTH)
    assert text.dtype == pooled.dtype == torch.float32 and not text.requires_grad and not pooled.requires_grad
    tokens = [["\u2581", "a", "\u2581red", "\u2581cat", "</s>", *["<pad>"] * 3]]
    ids = torch.tensor([[T5_WORDS.index(token) for token in row] for row in tokens])
    with torch.no_grad():
        torch.testing.assert_close(text[:1], tools.t5(ids).last_hidden_state, rtol=0, atol=1e-6)
        alone = tools.t5(ids[:, :5]).last_hidden_state
    assert (text[:1, :5] - alone).abs().max() > 1e-3, "padding is attended to"
    longer, same = tools.captions(TEXTS, 12)
    assert longer.shape == (3, 12, WIDTH) and torch.equal(same, pooled)


def test_a_caption_that_is_too_long_keeps_its_end_of_text(tools):
    whole, part = tools.captions(["red " * 40], 8), tools.captions(["red " * 90], 8)
    assert all(torch.equal(one, other) for one, other in zip(whole, part, strict=True))
    with torch.no_grad():
        text = tools.t5(torch.tensor([[T5_WORDS.index("\u2581red")] * 7 + [T5_WORDS.index("</s>")]])).last_hidden_state
        pooled = tools.clip(torch.tensor([[BEGIN, *[RED] * (ROOM - 2), END]])).last_hidden_state[:, -1]
    torch.testing.assert_close(part, (text, pooled), rtol=0, atol=1e-6)


@pytest.mark.parametrize("end", [2, END])
def test_a_whole_caption_is_embedded_at_its_first_end_of_text(folder, tools, end):
    """Old configurations name 2 as the end of text, which is the token "##" here. Then the end is the token of the
    largest number.
    """
    file = folder / "text_encoder/config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": end}))
    found = Encoders(folder, CPU)
    _, pooled = found.captions(["red cat", "## red"], 8)
    with torch.no_grad():
        expected = found.clip(torch.tensor([[BEGIN, RED, CAT, END]])).last_hidden_state[:, 3]
    torch.testing.assert_close(pooled[:1], expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(pooled, tools.captions(["red cat", "## red"], 8)[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("shift", [0.1159, None])
def test_latents_are_scaled_and_shifted(tmp_path, shift):
    write_encoders(tmp_path, shift=shift)
    tools, pixels = Encoders(tmp_path, CPU), torch.rand(2, 3, 24, 16) * 2 - 1
    mean, std = tools.encode(pixels)
    assert mean.shape == std.shape == (2, 4, 12, 8) and tools.factor == 2 and mean.dtype == std.dtype == torch.float32
    with torch.no_grad():
        plain = tools.autoencoder.encode(pixels).latent_dist
        expected = tools.autoencoder.decode(plain.mean).sample
    torch.testing.assert_close(mean, 0.3611 * (plain.mean - (shift or 0)), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(std, 0.3611 * plain.std, rtol=1e-6, atol=1e-6)
    image = tools.decode(mean)
    assert image.shape == pixels.shape and not image.requires_grad
    torch.testing.assert_close(image, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def test_weights_are_frozen_and_in_float32_whatever_the_files_have(tmp_path):
    write_encoders(tmp_path, dtype=torch.bfloat16)
    tools = Encoders(tmp_path, CPU)
    for module in (tools.clip, tools.t5, tools.autoencoder):
        assert not module.training
        assert all(weight.dtype == torch.float32 and not weight.requires_grad for weight in module.parameters())
    saved = load_file(tmp_path / "text_encoder_2/model.safetensors")["shared.weight"]
    assert saved.dtype == torch.bfloat16 and torch.equal(tools.t5.shared.weight, saved.float())


def test_names_and_configurations_as_published(folder, tools):
    """Published folders are those of transformers 4: CLIP's names have a prefix, and T5's embedding has one of two
    names.
    """
    clip, t5 = (folder / name for name in ("text_encoder", "text_encoder_2"))
    weights = {f"text_model.{name}": weight for name, weight in load_file(clip / "model.safetensors").items()}
    weights["text_model.embeddings.position_ids"] = torch.arange(ROOM)[None]
    save_file(weights, clip / "model.safetensors", {"format": "pt"})
    for part in (clip, t5):
        config = json.loads((part / "config.json").read_text()) | {
            "torch_dtype": "bfloat16",
            "tie_word_embeddings": False,
        }
        del config["dtype"]
        (part / "config.json").write_text(json.dumps(config | {"transformers_version": "4.43.3"}))
    found, expected = Encoders(folder, CPU).captions(TEXTS, 8), tools.captions(TEXTS, 8)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_clips_words_are_the_same_from_both_formats(folder, tools):
    shutil.rmtree(folder / "tokenizer")
    tools.clip_tokenizer.save_pretrained(folder / "tokenizer")
    assert not (folder / "tokenizer/merges.txt").exists() and len(MERGES) == 4
    for text, ids in (
        ("Red CAT", [RED, CAT]),
        ("  red\n cat ", [RED, CAT]),
        ("!!", [0, 95]),
        ("redcat", None),
        ("it's", None),
    ):
        found = [one.clip_tokenizer(text).input_ids for one in (tools, Encoders(folder, CPU))]
        assert found[0] == found[1] and found[0][0] == BEGIN and found[0][-1] == END, text
        assert ids is None or found[0][1:-1] == ids


def without_a_weight(folder):
    weights = load_file(folder / "text_encoder/model.safetensors")
    del weights["final_layer_norm.bias"]
    save_file(weights, folder / "text_encoder/model.safetensors", {"format": "pt"})


def with_other_shapes(part, **keys):
    def change(folder):
        file = folder / part / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | keys))

    return change


def with_pickles_alone(folder):
    for part, name in (("text_encoder_2", "pytorch_model.bin"), ("vae", "diffusion_pytorch_model.bin")):
        (file,) = (folder / part).glob("*.safetensors")
        torch.save(load_file(file), folder / part / name)
        file.unlink()


def with_an_index_of_pickles(folder):
    with_pickles_alone(folder)
    index = {"metadata": {}, "weight_map": {"shared.weight": "pytorch_model.bin"}}
    (folder / "text_encoder_2/model.safetensors.index.json").write_text(json.dumps(index))


DAMAGE = {
    "no folder": (shutil.rmtree, "/text_encoder: has no config.json"),
    "no configuration": (lambda folder: (folder / "vae/config.json").unlink(), "/vae: has no config.json"),
    "half a configuration": (
        lambda folder: (folder / "vae/config.json").write_text("{"),
        "/vae: cannot be read (It looks like",
    ),
    "a weight less": (without_a_weight, "/text_encoder: final_layer_norm.bias is missing, or has another shape than"),
    "another width of T5": (
        with_other_shapes("text_encoder_2", d_ff=41),
        ".layer.1.DenseReluDense.wi_0.weight is missing, or has",
    ),
    "other latents": (
        with_other_shapes("vae", latent_channels=5),
        "/vae: decoder.conv_in.weight is missing, or has another shape",
    ),
    "pickles": (with_pickles_alone, "/text_encoder_2: cannot be read (Error no file named model.safetensors"),
    "an index of pickles": (
        with_an_index_of_pickles,
        "/model.safetensors.index.json: names files that are not safetensors",
    ),
    "half a file": (
        lambda folder: (folder / "vae/diffusion_pytorch_model.safetensors").write_bytes(b"half"),
        "/vae: cannot be read (",
    ),
    "no merges": (
        lambda folder: (folder / "tokenizer/merges.txt").unlink(),
        "/tokenizer: has no tokenizer.json or vocab.json with",
    ),
    "half a tokenizer": (
        lambda folder: (folder / "tokenizer/vocab.json").write_text("{"),
        "/tokenizer: cannot be read (",
    ),
    "no T5 tokenizer": (
        lambda folder: (folder / "tokenizer_2/tokenizer.json").unlink(),
        "/tokenizer_2: has no tokenizer.json",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_cannot_be_read_is_one_line(folder, capfd, name):
    damage, line = DAMAGE[name]
    damage(folder)
    with pytest.raises(ConfigError) as error:
        Encoders(folder, CPU)
    assert line in str(error.value) and str(error.value).startswith(str(folder)) and "\n" not in str(error.value)
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_missing_libraries_are_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(
        ConfigError, match=r"is read by transformers and diffusers: pip install -e '\.\[images\]' \("
    ) as error:
        Encoders(tmp_path, CPU)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as error:
        compose_job(
            "model=flux_debug", "data=image_files", f"data.path={tmp_path}/a.jsonl", f"data.encoders={tmp_path}"
        )
    assert (
        "data.name=image_files: needs diffusers and transformers: pip install -e '.[images]'"
        in str(error.value).splitlines()
    )


def test_what_needs_no_encoders_imports_no_libraries():
    code = """import sys
from titan_hydra.core import data
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.recipes.flux import encode, encode_command, sample, sample_command
loader = data.build(compose_job("experiment=flux_laptop", "gpus=1", "data.local_batch=2"), 0, 1)
loader.next()
loader.close()
assert not {"transformers", "diffusers"} & set(sys.modules)"""
    subprocess.run([sys.executable, "-c", code], check=True)
