"""`titan verify widths` trains models of several sizes, and is red where the size decides what they learn."""

import json
import math

import pytest

from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.verify.widths import best_rate

FEW = (
    "verify",
    "widths",
    "--seeds",
    "1",
    "data.seq_len=8",
    "data.global_batch=2",
    "data.local_batch=2",
    "model.vocab_size=64",
)
MUP = ("parametrization=mup", "parametrization.base_dim=16", "optimizer.lr=1e-2")


def found(capsys, *words):
    status = cli.main([*FEW, *words, "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_activations_are_compared_and_drawn(capsys, tmp_path):
    """With one rate for all widths, a wider model's feed-forward changes more; with mup it does not."""
    picture = tmp_path / "widths.png"
    status, mup = found(capsys, *MUP, "--sizes", "64,256", "--plot", str(picture))
    assert picture.stat().st_size > 10_000 and status == (0 if mup["flat"] else 1)
    status, standard = found(capsys, "optimizer.lr=1e-3", "--sizes", "64,256")
    assert status == 1 and set(standard["kinds"]) == {"embedding", "attention", "feed-forward", "logits"}
    for kind in ("attention", "feed-forward"):
        assert standard["kinds"][kind]["slope"] > 0.3 > 0.15 > abs(mup["kinds"][kind]["slope"])


def test_best_rate_is_the_lowest_point_of_a_parabola():
    assert best_rate(
        {rate: (math.log(rate) - math.log(0.003)) ** 2 for rate in (1e-3, 2e-3, 4e-3, 8e-3)}
    ) == pytest.approx(0.003)
    assert best_rate({1e-3: 3.0, 2e-3: 2.0, 4e-3: math.nan}) == 2e-3
    assert best_rate({1e-3: 1.0, 2e-3: 2.0, 4e-3: 3.0}) == 1e-3


@pytest.mark.parametrize("family", ["llama3", "qwen3", "qwen3_moe", "deepseek_v3"])
def test_all_widths_but_a_heads_grow_in_proportion(family):
    model = compose_job(f"model={family}_debug").model
    wide = model.widened(1024)
    assert (wide.dim, wide.n_heads, wide.n_kv_heads, wide.ffn_width) == (
        1024,
        4 * model.n_heads,
        4 * model.n_kv_heads,
        4 * model.ffn_width,
    )
    assert wide.head_width == model.head_width and wide.value_width == model.value_width
    for key in ("expert_dim", "q_lora_rank", "kv_lora_rank"):
        assert getattr(wide, key, 4) == 4 * getattr(model, key, 1)
    with pytest.raises(ConfigError, match="would not be a whole number"):
        model.widened(100)


@pytest.mark.parametrize("words", [("--sizes", "64"), ("--rates", "1e-3"), ("--plot", "x.svg")])
def test_what_cannot_be_compared_is_refused_in_a_line(capsys, words):
    assert cli.main([*FEW, *words]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
