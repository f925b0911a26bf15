"""Qwen3: the same logits as transformers' Qwen3ForCausalLM, both ways; heads of a width of their own; norms that keep the input's dtype."""
import argparse
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_hydra.base.errors import ConfigError
from titan_hydra.checkpoint import convert
from titan_hydra.commands import convert as convert_command
from titan_hydra.config import compose_job, to_dict
from titan_hydra.models import build, family_of
from titan_hydra.models.init import init_weights
from titan_hydra.models.qwen3.config import Qwen3Config


def small(**changes):
    values = {"name": "small", "family": "qwen3", "vocab_size": 99, "dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32,
              "ffn_dim": 100, "norm_eps": 1e-6, "rope_theta": 1e6, "max_seq_len": 256}
    return Qwen3Config(**values | changes)


def loud_model(config):
    """A model whose attention, positions and norms all show in the logits."""
    model = build(config, 128)
    init_weights(model, config, seed=0)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.layers.parameters():
        parameter.data.mul_(5 if parameter.dim() > 1 else 1 + torch.rand(parameter.shape, generator=generator))
    return model


def titan_convert(*words):
    parser = argparse.ArgumentParser()
    convert_command.add_arguments(parser)
    assert convert_command.main(parser.parse_args([str(word) for word in words])) == 0


def some_tokens():
    return torch.randint(0, 99, (2, 128), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True}, {"head_dim": None}], ids=["wide heads", "tied", "plain heads"])
def test_transformers_computes_the_same_logits(changes, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = small(**changes)
    model, step = loud_model(config), tmp_path / "run/checkpoints/step-00000010"
    dcp.save({"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter(step), no_dist=True)
    (tmp_path / "run/config.json").write_text(json.dumps({"model": to_dict(config)}))
    titan_convert(tmp_path / "run", "--to", "hf", tmp_path / "hf", "--dtype", "float32")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, output_loading_info=True)
    assert type(theirs) is transformers.Qwen3ForCausalLM
    assert not any(info.values()), info
    with torch.no_grad():
        torch.testing.assert_close(model(some_tokens()), theirs.eval()(some_tokens()).logits, atol=1e-5, rtol=0)


def test_transformers_own_folder_can_be_imported(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(
        vocab_size=99, hidden_size=64, intermediate_size=100, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=256)).float().eval()
    theirs.save_pretrained(tmp_path / "hf")
    titan_convert(tmp_path / "hf", "--from", "hf", tmp_path / "checkpoint")
    config = convert.read_model_config(tmp_path / "checkpoint")
    assert (type(config), config.head_dim, config.ffn_dim) == (Qwen3Config, 32, 100)
    model = build(config, 128)
    state = {"model": {name: torch.empty_like(value) for name, value in model.state_dict().items()}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "checkpoint"), no_dist=True)
    model.load_state_dict(state["model"])
    with torch.no_grad():
        torch.testing.assert_close(model(some_tokens()), theirs(some_tokens()).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("key", "value"), [("use_sliding_window", True), ("attention_bias", True), ("hidden_act", "gelu")])
def test_what_it_does_not_have_is_refused(key, value, tmp_path):
    side = family_of(small()).part("hf")
    with pytest.raises(ConfigError, match=f"{key}={value}: only"):
        side.from_config(side.to_config(small(), torch.float32) | {key: value}, tmp_path / "config.json")
    with pytest.raises(ConfigError, match="rope_type=yarn"):
        side.from_config(side.to_config(small(), torch.float32) | {"rope_scaling": {"rope_type": "yarn"}}, tmp_path / "config.json")


def test_keys_of_llama_are_not_qwens():
    with pytest.raises(ConfigError, match=r"model\.multiple_of=8: no such key"):
        compose_job("model=qwen3_debug", "model.multiple_of=8")
    with pytest.raises(ConfigError, match=r"model\.ffn_dim=null"):
        compose_job("model=qwen3_debug", "model.ffn_dim=null")
