"""muP's and CompleteP's factors are those of the papers' tables, and at the base's size they change nothing."""

import math

import pytest

from titan_hydra.core.job.config.family import ROLES, decoder_role
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.parametrization import RateFactors, rules_of
from titan_hydra.core.job.rules.parametrization import parametrizations_know_roles_and_rates
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked

WIDE = ("model.dim=1024", "model.n_heads=64", "model.n_kv_heads=64", "parametrization=mup")


def rules(*overrides):
    job = compose_job(*overrides)
    return rules_of(job.model, job.parametrization)


@pytest.mark.parametrize(
    ("name", "role", "adamw", "muon"),
    [
        ("tok_embeddings.weight", "embedding", (1, 1, 1 / 4), (1, 1, 1)),
        ("output.weight", "output", (1, 1, 1 / 4), (1, 1, 1)),
        ("norm.weight", "vector", (1, 1, 1 / 4), (1, 1, 1)),
        ("layers.3.attention_norm.weight", "vector", (1, 1, 1 / 12), (1, 1, 1)),
        ("layers.3.attention.q_norm.weight", "vector", (1, 1, 1 / 12), (1, 1, 1)),
        ("layers.3.attention.wq.weight", "hidden", (1 / 4, 4, 1 / 12), (1, 1, 1)),
        ("layers.3.feed_forward.experts.w2", "hidden", (1 / 4, 4, 1 / 12), (1, 1, 1)),
        ("layers.3.feed_forward.router.weight", "router", (1 / 4, 4, 1 / 3), (1 / 2, 2, 1)),
    ],
)
def test_factors_by_role(name, role, adamw, muon):
    """The tables of arXiv 2203.03466 (table 8) and 2505.01618 (table 1), four times as wide and three times as deep."""
    found = rules(*WIDE, "parametrization.base_layers=2")
    assert decoder_role(name) == role and role in ROLES
    assert found.factors(name, (8, 1024), orthogonal=False) == pytest.approx(RateFactors(*adamw))
    assert found.factors(name, (8, 1024), orthogonal=True) == pytest.approx(RateFactors(*muon))


def test_scales_of_the_forward():
    found = rules(*WIDE, "parametrization.base_layers=2", "parametrization.base_head_dim=4")
    assert found.scales == pytest.approx((math.sqrt(4) / 16 * math.sqrt(16), 1 / 3, 1 / 4))
    assert rules(*WIDE).scales == (1, 1, 1 / 4)  # heads as wide as the base's, depth left alone


@pytest.mark.parametrize("overrides", [(), ("parametrization=mup", "parametrization.base_layers=6")])
def test_at_the_size_of_the_base_nothing_changes(overrides):
    found = rules(*overrides)
    assert found.scales == (1, 1, 1)
    for name in ("layers.5.attention.wo.weight", "norm.weight", "layers.1.feed_forward.router.weight"):
        assert found.factors(name, (8, 256), True) == found.factors(name, (8, 256), False) == (1, 1, 1)
        assert found.start(name) == (name, found.model, 1)


def test_blocks_start_as_the_bases_at_the_same_depth():
    found = rules(*WIDE, "parametrization.base_layers=2")
    assert [found.start(f"layers.{i}.attention.wo.weight").name.split(".")[1] for i in range(6)] == list("000111")
    assert found.start("layers.5.attention.wo.weight").factor == 1 / 2
    assert found.start("layers.5.feed_forward.router.weight").factor == 1 / 4
    assert found.start("tok_embeddings.weight").factor == found.start("output.weight").factor == 1
    assert found.start("output.weight").config.dim == 256


@pytest.mark.parametrize(
    ("overrides", "key", "words"),
    [
        (("optimizer=sgd",), "optimizer.name", "updates grow with the gradient"),
        (("adapter=lora", "checkpoint.initial_load_path=x"), "adapter.name", "two matrices of an adapter"),
        (("model=llama3_vision_debug", "data=synthetic_image_text"), "parametrization.name", "gives its parameters no"),
    ],
)
def test_what_has_no_factors_is_refused(overrides, key, words):
    job = freeze(compose_unchecked(*overrides, "parametrization=mup"))
    (fault,) = parametrizations_know_roles_and_rates(job)
    assert fault.key == key and words in fault.reason and fault.legal
