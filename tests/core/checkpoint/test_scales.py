"""The scales of mup are multiplied into the weights of an export, and weights are refused where other scales are."""

import copy
import json

import pytest
import torch

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.convert import check_scales, reader_of
from titan_hydra.core.job.config import to_dict
from titan_hydra.core.job.parametrization import Rules, rules_of
from titan_hydra.core.models.init import scale_forward
from titan_hydra.core.train.generate import load_model
from titan_hydra.experiments.compose.compose import compose_job

from .conversion import assert_transformers_agrees, loud_model, save_run, some_tokens, titan_checkpoint

SMALL = (
    "model.dim=64",
    "model.n_layers=2",
    "model.n_heads=4",
    "model.n_kv_heads=4",
    "model.vocab_size=99",
    "data=synthetic",
    "parametrization=mup",
    "parametrization.base_dim=24",
    "parametrization.base_head_dim=5",
    "parametrization.base_layers=3",
)
FAMILIES = {
    "LlamaForCausalLM": ("model=llama3_debug",),
    "tied": ("model=llama3_debug", "model.tie_embeddings=true"),
    "Qwen3ForCausalLM": ("model=qwen3_debug", "model.head_dim=16"),
    "Qwen3MoeForCausalLM": ("model=qwen3_moe_debug", "model.head_dim=16", "model.expert_dim=32"),
    "DeepseekV3ForCausalLM": ("model=deepseek_v3_debug", "model.expert_dim=32"),
    "no latent": ("model=deepseek_v3_debug", "model.expert_dim=32", "model.q_lora_rank=0"),
}


def trained(job, folder):
    """Return the model of a run, which computes with the scales of its parametrization."""
    model = loud_model(job.model)
    save_run(model, job.model, folder)
    scale_forward(model, job.model, rules_of(job.model, job.parametrization))
    sections = {"model": to_dict(job.model), "parametrization": to_dict(job.parametrization)}
    (folder / "config.json").write_text(json.dumps(sections))
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_computes_what_the_run_computes(family, tmp_path):
    job = compose_job(*FAMILIES[family], *SMALL)
    assert 1 not in rules_of(job.model, job.parametrization).scales
    model = trained(job, tmp_path / "run")
    titan_checkpoint("export", tmp_path / "run", tmp_path / "hf", "--dtype", "float32")
    kind = {"tied": "LlamaForCausalLM", "no latent": "DeepseekV3ForCausalLM"}.get(family, family)
    assert_transformers_agrees(model, tmp_path / "hf", kind)


def test_generate_and_score_compute_it_too(tmp_path):
    job = compose_job(*FAMILIES["LlamaForCausalLM"], *SMALL)
    model = trained(job, tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step-00000010"
    again = load_model(reader_of(checkpoint), copy.copy(job.model), 128, "float32")
    with torch.no_grad():
        torch.testing.assert_close(again(some_tokens()), model(some_tokens()), atol=1e-5, rtol=0)


def test_weights_of_other_scales_are_refused(tmp_path):
    job = compose_job(*FAMILIES["tied"], *SMALL)
    trained(job, tmp_path / "run")
    checkpoint = tmp_path / "run/checkpoints/step-00000010"
    check_scales(checkpoint, rules_of(job.model, job.parametrization))
    with pytest.raises(ConfigError, match="its weights belong to the scales"):
        check_scales(checkpoint, Rules(job.model))
    titan_checkpoint("export", checkpoint, tmp_path / "hf")
    check_scales(tmp_path / "hf", Rules(job.model))
    with pytest.raises(ConfigError, match="its weights belong to the scales"):
        check_scales(tmp_path / "hf", rules_of(job.model, job.parametrization))
