"""Qwen3 has the same logits as transformers' Qwen3ForCausalLM, in both directions; its heads have a width of their own,
and its norms keep the input's dtype.
"""

import pytest
import torch

from tests.core.checkpoint.conversion import assert_transformers_agrees, exported, load, some_tokens, titan_checkpoint
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint import convert
from titan_hydra.core.models import build, family_of
from titan_hydra.core.models.qwen3.config import Qwen3Config
from titan_hydra.experiments.compose.compose import compose_job


def small(**changes):
    values = {
        "name": "small",
        "family": "qwen3",
        "vocab_size": 99,
        "dim": 64,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 32,
        "ffn_dim": 100,
        "norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_seq_len": 256,
    }
    return Qwen3Config(**values | changes)


@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": True}, {"head_dim": None}], ids=["wide heads", "tied", "plain heads"]
)
def test_transformers_computes_the_same_logits(changes, tmp_path):
    assert_transformers_agrees(*exported(small(**changes), tmp_path), "Qwen3ForCausalLM")


def test_transformers_own_folder_can_be_imported(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = (
        transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                vocab_size=99,
                hidden_size=64,
                intermediate_size=100,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=32,
                max_position_embeddings=256,
            )
        )
        .float()
        .eval()
    )
    theirs.save_pretrained(tmp_path / "hf")
    titan_checkpoint("import", tmp_path / "hf", tmp_path / "checkpoint")
    config = convert.read_model_config(tmp_path / "checkpoint")
    assert (type(config), config.head_dim, config.ffn_dim) == (Qwen3Config, 32, 100)
    model = load(build(config, 128), tmp_path / "checkpoint")
    with torch.no_grad():
        torch.testing.assert_close(model(some_tokens()), theirs(some_tokens()).logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("key", "value"), [("use_sliding_window", True), ("attention_bias", True), ("hidden_act", "gelu")]
)
def test_what_it_does_not_have_is_refused(key, value, tmp_path):
    side = family_of(small()).part("hf")
    with pytest.raises(ConfigError, match=f"{key}={value}: only"):
        side.from_config(side.to_config(small(), torch.float32) | {key: value}, tmp_path / "config.json")
    with pytest.raises(ConfigError, match="rope_type=yarn"):
        side.from_config(
            side.to_config(small(), torch.float32) | {"rope_scaling": {"rope_type": "yarn"}}, tmp_path / "config.json"
        )


def test_keys_of_llama_are_not_qwens():
    with pytest.raises(ConfigError, match=r"model\.multiple_of=8: no such key"):
        compose_job("model=qwen3_debug", "model.multiple_of=8")
    with pytest.raises(ConfigError, match=r"model\.ffn_dim=null"):
        compose_job("model=qwen3_debug", "model.ffn_dim=null")
