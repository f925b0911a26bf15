"""Models with experts have the same losses, gradients, loads of experts and biases as separate arithmetic in float64."""

import pytest

from titan_hydra.verify.matrix import LATENT, MOE, case
from titan_hydra.verify.verify import verify

EXACT = {"reference": "float64", "loss": 2e-6, "norm": 1e-5, "gradients": 1e-5, "weights": 2e-3}
YARN = ("model.yarn.factor=8", "model.yarn.original_max_seq_len=16", "model.yarn.temperature=0.7")
MODELS = {
    "qwen3_moe": MOE,
    "qwen3_moe, plain scores, a dense block, the loss of balance": (
        *MOE,
        "model.norm_topk_prob=false",
        "model.first_k_dense_replace=1",
        "model.routed_scaling_factor=1.5",
        "model.sequence_balance=0.05",
    ),
    "qwen3_moe, sigmoid": (*MOE, "model.router=sigmoid", "model.n_shared_experts=1"),
    "deepseek_v3": LATENT,
    "deepseek_v3, yarn, no latent of queries": (*LATENT, *YARN, "model.q_lora_rank=0", "model.norm_eps=1e-4"),
}


@pytest.mark.parametrize("name", MODELS)
def test_experts_learn_what_float64_learns(name):
    (outcome,) = verify([case(name, 1, "parallelism=single", "data.local_batch=4", base=MODELS[name], uneven_mask="loss" in name, **EXACT)])
    assert outcome.passed, outcome
