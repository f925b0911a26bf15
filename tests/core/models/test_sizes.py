"""Compare sizes and costs of the models in conf/model with published numbers."""

from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

from titan_hydra.core.models import build, decoder_flops, family_of
from titan_hydra.core.models.llama3.config import Llama3Config, RopeScaling
from titan_hydra.core.models.qwen3.config import Qwen3Config

PARAMETERS = {
    "llama3_debug": 6_163_712,
    "llama3_1b": 1_235_814_400,
    "llama3_3b": 3_212_749_824,
    "llama3_8b": 8_030_261_248,
    "llama3_70b": 70_553_706_496,
    "llama3_405b": 405_853_388_800,
    # From the safetensors of Qwen/Qwen3-* on Hugging Face; a tied head is counted once.
    "qwen3_0_6b": 596_049_920,
    "qwen3_1_7b": 1_720_574_976,
    "qwen3_4b": 4_022_468_096,
    "qwen3_8b": 8_190_735_360,
    "qwen3_14b": 14_768_307_200,
    "qwen3_32b": 32_762_123_264,
}
CONFIGS = {"llama3": Llama3Config, "qwen3": Qwen3Config}


def option(name):
    values = yaml.safe_load((Path(__file__).parents[3] / f"conf/model/{name}.yaml").read_text())
    values = values.get("model", values)  # the debug model's option sets keys of other groups too
    if "rope_scaling" in values:
        values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
    return CONFIGS[values["family"]](**values)


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_those_of_the_published_model(name):
    config = option(name)
    if name == "llama3_debug":
        config.vocab_size = 2048  # the count was made with TorchTitan's tokenizer
    assert family_of(config).parameters(config) == PARAMETERS[name]
    with torch.device("meta"):
        assert sum(p.numel() for p in build(config, 16).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_an_option_gives_every_key_of_its_family_that_others_lack(name):
    """An option sets every key that only its family has, so that `--cfg job` shows the whole model: Hydra does not know
    a family's defaults.
    """
    config = option(name)
    own = {spec.name for spec in fields(config)} - {spec.name for spec in fields(type(config).__mro__[1])}
    values = yaml.safe_load((Path(__file__).parents[3] / f"conf/model/{name}.yaml").read_text())
    assert own <= values.get("model", values).keys()


@pytest.mark.parametrize("name, flops", [("llama3_8b", 5.791e10), ("llama3_70b", 4.814e11), ("llama3_405b", 2.625e12)])
def test_flops_of_a_token(name, flops):
    assert decoder_flops(option(name), 8192, PARAMETERS[name]) == pytest.approx(flops, rel=2e-4)


def test_a_tied_embedding_is_a_head_and_costs(tiny):
    tied, untied = tiny(tie_embeddings=True), tiny()
    counts = [family_of(config).parameters(config) for config in (untied, tied)]
    assert counts[0] - counts[1] == 99 * 64
    assert decoder_flops(tied, 32, counts[1]) == decoder_flops(untied, 32, counts[0])
