"""Test what other rooms do for FLUX: number formats, attention, warnings about captions, threads."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from tests.core.data.test_unknown import ROWS, letters, warned
from tests.core.parallel.test_float8 import EMULATED, converted
from tests.core.parallel.test_fused import FUSED, job_of
from tests.experiments.report.test_changes import what_differs
from titan_hydra.core.job.config.attention import call_of
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.recipes.flux import encode
from titan_hydra.recipes.flux.images import Caption
from titan_hydra.recipes.flux.model import Modulation

__all__ = ["letters"]
OWN = 3  # the device of this rank


@pytest.mark.parametrize("kernels", ["torchao", "fused"])
def test_a_linear_that_computes_more_or_sees_few_rows_stays(kernels):
    """FLUX's modulations split their output. The modulations and the embedders get one row per sample, too few rows for
    the matmul of the weight's gradient.
    """
    model, (line, *_) = converted(
        compose_job("model=flux_debug", "data=synthetic_images", *EMULATED, f"precision.kernels={kernels}")
    )
    plain = {name for name, module in model.named_modules() if type(module) in (nn.Linear, Modulation)}
    assert plain == {
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and ("modulation" in name or name.split(".")[0] in ("time_in", "vector_in", "guidance_in", "output"))
    }
    assert (
        "(one row a sample)" in line
        and "(a Modulation, with a forward of its own)" in line
        and "layers.*.heads.wq" in line
    )


def test_its_linears_are_cast_by_themselves():
    words = ("model=flux_debug", "model.n_kv_heads=8", "data=synthetic_images", "data.seq_len=33")
    _, (_, line) = converted(job_of(*FUSED, *words))
    assert "cast together: none;" in line and "heads.wq" in line.partition("each by itself: ")[2]


def test_attention_sees_all():
    assert not call_of(compose_job("model=flux_debug", "data=synthetic_images")).causal


def test_captions_for_text_encoders(tmp_path, letters):
    """FLUX's captions are read by T5's tokenizer, which is in the encoders' folder."""
    (tmp_path / "encoders" / "tokenizer_2").mkdir(parents=True)
    shutil.copy(letters, tmp_path / "encoders" / "tokenizer_2" / "tokenizer.json")
    lines = tmp_path / "images.jsonl"
    own = (
        "model=flux_debug",
        "data=image_files",
        f"data.path={lines}",
        "objective=diffusion",
        f"data.encoders={tmp_path}/encoders",
    )
    lines.write_text("\n".join(json.dumps({"image": "a.png", "caption": text}) for text in ROWS[::-1]))
    (line,) = warned(*own)
    assert f"unknown to the tokenizer {tmp_path}/encoders/tokenizer_2/tokenizer.json, most often" in line
    lines.write_text(json.dumps({"image": "a.png", "caption": ROWS[0]}))
    assert not warned(*own) and not warned(*own[:-1])


def test_images_are_encoded_in_a_stream_of_their_own(monkeypatch):
    """In the step's stream, each image would wait for all kernels that are already queued."""
    entered, seen = [], []

    class Stream:
        def __init__(self, priority):
            self.priority = priority

        def __enter__(self):
            entered.append(self)

        def __exit__(self, *_):
            entered.pop()

    tools = SimpleNamespace(device=torch.device("cuda", OWN), factor=8)
    row = {name: torch.zeros(1, 2) for name in ("mean", "std", "text", "pooled")}
    monkeypatch.setattr(encode, "Encoders", lambda *_: tools)
    monkeypatch.setattr(encode, "captioned", lambda _: [("image", "caption")])
    monkeypatch.setattr(encode, "caption_of", lambda *_: Caption(np.zeros(2), np.zeros(2)))
    monkeypatch.setattr(
        encode, "encoded", lambda *_: (seen.append(entered[-1].priority if entered else "the step's"), row)[1]
    )
    monkeypatch.setattr(encode, "CaptionedImages", lambda read, *_: read)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    model = SimpleNamespace(latent_side=lambda length: 2, text_len=4)
    wanted = SimpleNamespace(
        job=SimpleNamespace(model=model, data=SimpleNamespace(seq_len=8, shuffle=True)), split="train"
    )
    read = encode.open_image_files("data", SimpleNamespace(encoders="", path="", caption_dropout=0.0), wanted, 0)
    read(0)
    assert seen == [-1]


def test_the_report_knows_what_its_keys_change(flat):
    expected = {"data.encoders": {"learning"}, "data.caption_dropout": {"learning"}}
    assert {key: what_differs(flat, key) for key in expected} == expected
