"""Test the band of tolerated differences, which is measured on the machine where a proof runs: differences by rounding
lie within the band, larger ones outside it.
"""

import pytest
import torch

from titan_hydra.core.data.batch import Batch, Dims
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.verify.case import ROWWISE, case
from titan_hydra.instruments.verify.draws import shuffled
from titan_hydra.instruments.verify.judge import MULTIPLE, TIGHT, beyond, flips, parts_of_linears, whole_parts, widen
from titan_hydra.instruments.verify.reference import Trace
from titan_hydra.instruments.verify.verify import verify


def found(**weights):
    return {"loss": {"loss": 0.0}, "norm": {"norm": 0.0}, "gradients": {}, "weights": weights}


def test_each_parameter_has_a_band_of_its_own():
    spread = widen(found(a=1e-2, b=1e-5), found(a=3e-3, b=2e-5))
    assert beyond(found(a=3e-2, b=1e-5), spread, {}) == pytest.approx(3e-2 / (MULTIPLE["weights"] * 1e-2))
    # the disturbed runs hardly changed this parameter
    assert beyond(found(a=1e-5, b=3e-2), spread, {}) == pytest.approx(3e-2 / TIGHT["weights"])
    assert beyond(found(a=float("inf"), b=0.0), spread, {}) == float("inf")


def test_a_band_has_room_for_one_element_that_adamw_moved_the_other_way():
    start, moved = torch.zeros(64), torch.full((64,), 3e-3)  # three steps with a learning rate of 1e-3
    other = moved.clone()
    other[0] -= 2e-3
    trace = Trace([0.0] * 3, [0.0] * 3, {}, {"norm": start}, {"norm": moved}, [], {})
    once = flips(trace, "adamw")
    assert once["norm"] == pytest.approx(((other - moved).norm() / moved.norm()).item())
    assert (
        beyond(found(norm=once["norm"]), found(norm=1e-2), once)
        < 1
        < beyond(found(norm=2 * once["norm"]), found(norm=1e-2), once)
    )
    assert flips(trace, "sgd") == {}, "a step of SGD is as small as the gradient"


def test_a_gradient_has_a_band_without_that_room():
    first = found() | {"gradients": {"a": 3e-2}}
    assert beyond(first, {}, {"a": 1.0}) == pytest.approx(3)
    assert (
        beyond(first, found() | {"gradients": {"a": 1.1e-2}}, {})
        < 1
        < beyond(first, found() | {"gradients": {"a": 5e-3}}, {"a": 1.0})
    )


def test_eight_bits_are_within_the_band_and_what_is_learned_otherwise_is_not():
    """The second layout has another weight decay than its reference. The fixed tolerances for 8 bits let this
    difference pass.
    """
    single = ("parallelism=single", "data.local_batch=4")
    cases = [case("same", 1, *single, **ROWWISE), case("other", 1, *single, "optimizer.weight_decay=0", **ROWWISE)]
    same, other = verify(cases, steps=3)
    assert same.passed, same
    assert other.weights <= other.case.weights and other.gradients <= other.case.gradients
    assert other.band > 1 and not other.passed, other


@pytest.mark.parametrize(
    ("samples", "wanted", "parts"),
    [(16, 4, 4), (16, 1, 1), (3, 2, 3), (3, 4, 3), (9, 2, 3), (10, 4, 5), (5, 2, 5), (2, 4, 2), (1, 2, 1)],
)
def test_a_draw_cuts_a_batch_of_any_size(samples, wanted, parts):
    """A batch of three, which eight draws left whole, made the band of a layout that adds up three parts too narrow."""
    assert whole_parts(samples, wanted) == parts


def test_draws_shuffle_whole_samples():
    batch = Batch(
        {"tokens": torch.arange(12).view(4, 3), "noise": torch.arange(4)}, {"tokens": Dims(), "noise": Dims()}
    )
    one, other = shuffled(batch, 1, 4), shuffled(batch, 2, 4)
    assert not torch.equal(one["noise"], other["noise"])
    for some in (one, other):
        assert torch.equal(some["tokens"][:, 0], 3 * some["noise"]) and set(some["noise"].tolist()) == {0, 1, 2, 3}
    kept = [shuffled(batch, seed, 2)["noise"].tolist() for seed in range(8)]
    assert all({*order[:2]} == {0, 1} for order in kept) and len({*map(tuple, kept)}) > 1


@pytest.mark.parametrize(
    ("layout", "parts"),
    [
        (("gpus=2", "parallelism=cp", "precision=bf16"), 2),
        (("gpus=2", "parallelism=cp", "precision=fp32"), 1),
        (("gpus=4", "parallelism=tp", "parallelism.tp=4", "precision=bf16"), 4),
        (("gpus=2", "parallelism=fsdp", "precision=bf16"), 1),
    ],
)
def test_draws_round_parts_where_a_layout_does(layout, parts):
    assert parts_of_linears(compose_job("debug=tiny", "model.n_kv_heads=4", *layout)) == parts
