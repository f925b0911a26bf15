"""Sizes and costs of the models in conf/model, against the numbers published for them."""
from pathlib import Path

import pytest
import torch
import yaml

from titan_hydra.config.schema import Model, RopeScaling
from titan_hydra.models import build
from titan_hydra.models.flops import count_parameters, flops_per_token

PARAMETERS = {"debug": 6_163_712, "1b": 1_235_814_400, "3b": 3_212_749_824, "8b": 8_030_261_248, "70b": 70_553_706_496,
              "405b": 405_853_388_800}


def option(size):
    values = yaml.safe_load((Path(__file__).parents[2] / f"conf/model/llama3_{size}.yaml").read_text())
    values = values.get("model", values)  # the debug model's option sets other groups' keys too
    return Model(**values | {"rope_scaling": RopeScaling(**values.get("rope_scaling", {}))})


@pytest.mark.parametrize("size", PARAMETERS)
def test_parameters_are_those_of_the_published_model(size):
    config = option(size)
    if size == "debug":
        config.vocab_size = 2048  # TorchTitan's tokenizer of the count, not ours
    assert count_parameters(config) == PARAMETERS[size]
    with torch.device("meta"):
        assert sum(p.numel() for p in build(config, 16).parameters()) == PARAMETERS[size]


@pytest.mark.parametrize("size, flops", [("8b", 5.791e10), ("70b", 4.814e11), ("405b", 2.625e12)])
def test_flops_of_a_token(size, flops):
    assert flops_per_token(option(size), 8192) == pytest.approx(flops, rel=2e-4)


def test_a_tied_embedding_is_a_head_and_costs(tiny):
    tied, untied = tiny(tie_embeddings=True), tiny()
    assert count_parameters(untied) - count_parameters(tied) == 99 * 64
    assert flops_per_token(tied, 32) == flops_per_token(untied, 32)
