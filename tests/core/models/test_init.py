"""Initial weights have the same bits on every layout, and are good random numbers."""

import dataclasses
import math
from statistics import NormalDist

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import from_dict
from titan_hydra.core.job.config.schema import Parametrization
from titan_hydra.core.job.parametrization import rules_of
from titan_hydra.core.models import build, init
from titan_hydra.core.models.init import Normal, clean_name, init_weights, key_of_parameter, normal


def initial(config, shape=lambda model: None, seed=7):
    """Return a model built as the trainer builds it: meta device, split by `shape`, to_empty, init_weights."""
    with torch.device("meta"):
        model = build(config, 32)
    shape(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, torch.nan)  # parameters that are not written stay NaN
    init_weights(model, config, seed)
    return model


def fsdp(model, mesh):
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def tensor_parallel(model, mesh):
    parallelize_module(model, mesh, {"tok_embeddings": RowwiseParallel(), "output": ColwiseParallel()})
    for block in model.layers.values():
        parallelize_module(
            block,
            mesh,
            {
                name: ColwiseParallel()
                for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
            },
        )
        parallelize_module(block, mesh, {name: RowwiseParallel() for name in ("attention.wo", "feed_forward.w2")})


LAYOUTS = {
    "fsdp": ((4,), lambda model, mesh: fsdp(model, mesh["a"])),
    "hsdp": ((2, 2), fsdp),
    "tp": ((2,), lambda model, mesh: tensor_parallel(model, mesh["a"])),
    "fsdp_tp": ((2, 2), lambda model, mesh: (tensor_parallel(model, mesh["b"]), fsdp(model, mesh["a"]))),
}


@pytest.mark.parametrize("vocab", [2048, 2047])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_starts_from_the_same_bits(layout, vocab, tiny, on_ranks, monkeypatch):
    config = tiny(vocab_size=vocab, dim=32, n_heads=2, n_kv_heads=2, n_layers=2)
    whole = dict(initial(config).named_parameters())
    degrees, split = LAYOUTS[layout]

    def task(rank):
        drawn = []
        monkeypatch.setattr(init, "normal", lambda index, *rest: drawn.append(index.numel()) or normal(index, *rest))
        monkeypatch.setattr(init, "CHUNK", 1000)  # several chunks, whose ends are not those of the shards
        mesh = init_device_mesh("cpu", degrees, mesh_dim_names=("a", "b")[: len(degrees)])
        model = initial(config, lambda model: split(model, mesh))
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor) or "norm" in name
            full = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            assert torch.equal(full, whole[name]), (name, getattr(parameter, "placements", None))
        matrices = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters() if p.dim() > 1]
        assert sum(drawn) == sum(p.numel() for p in matrices)  # each rank draws its own elements only
        assert max(drawn) <= 1000

    on_ranks(math.prod(degrees), task)


def test_a_stage_starts_as_the_whole_does(tiny):
    config = tiny()

    def last_stage(model):
        model.tok_embeddings = None
        del model.layers["0"]

    whole, stage = initial(config), initial(config, last_stage)
    assert set(stage.layers) == {"1", "2"}
    for name, parameter in stage.named_parameters():
        assert torch.equal(parameter, whole.get_parameter(name)), name
    assert torch.equal(stage.rotary, build(config, 32).rotary)


def test_wrappers_do_not_change_the_weights(tiny):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    config = tiny()

    def wrap(model):
        model.layers["1"] = torch.compile(checkpoint_wrapper(model.layers["1"]), backend="eager")

    wrapped = dict(initial(config, wrap).named_parameters())
    assert "layers.1._orig_mod._checkpoint_wrapped_module.ffn_norm.weight" in wrapped
    whole = initial(config)
    for name, parameter in wrapped.items():
        assert torch.equal(parameter, whole.get_parameter(clean_name(name))), name


def test_distribution_of_each_parameter(tiny):
    config = tiny(vocab_size=4096, dim=128, n_heads=4, n_layers=4, ffn_dim_multiplier=4.0)
    model = initial(config)
    # a normal distribution cut at 3 sigma has 0.98658 of its standard deviation
    expected = {
        "tok_embeddings.weight": 1.0,
        "layers.0.attention.wq.weight": 0.02,
        "layers.3.attention.wk.weight": 0.02,
        "layers.1.feed_forward.w1.weight": 0.02,
        "layers.0.attention.wo.weight": 0.02 / 2**0.5,
        "layers.3.feed_forward.w2.weight": 0.02 / 8**0.5,
        "layers.2.feed_forward.w3.weight": 0.02 / 6**0.5,
        "output.weight": 128**-0.5 * 0.98658,
    }
    for name, std in expected.items():
        assert model.get_parameter(name).std().item() == pytest.approx(std, rel=0.03), name
    assert 2.95 * 128**-0.5 < model.output.weight.abs().max() <= 3 * 128**-0.5
    assert all((p == 1).all() for name, p in model.named_parameters() if "norm" in name)
    tied = initial(tiny(vocab_size=4096, dim=128, tie_embeddings=True))
    assert tied.tok_embeddings.weight.std().item() == pytest.approx(128**-0.5 * 0.98658, rel=0.03)


def test_numbers_are_normal_and_uncorrelated():
    count = 1_000_000
    first, *others = (
        normal(torch.arange(count), Normal(1.0), key_of_parameter(seed, f"layers.{layer}.attention.wq.weight")).double()
        for seed, layer in [(0, 0), (0, 1), (1, 0)]
    )
    error = count**-0.5
    for x in (first, *others):
        assert abs(x.mean()) < 4 * error
        assert abs(x.std() - 1) < 4 * error / 2**0.5
        assert abs((x**4).mean() - 3) < 4 * error * 96**0.5
        assert abs((x > 2).double().mean() - 0.0227501) < 4 * error * 0.15
        rows = x.view(1000, 1000)
        for a, b in [(rows[1:], rows[:-1]), (rows[:, 1:], rows[:, :-1]), (rows[:, 512:], rows[:, :-512])]:
            assert abs((a * b).mean()) < 4 * error
            assert abs((a.abs() * b.abs()).mean() - 2 / torch.pi) < 4 * error
    for other in others:
        assert abs((first * other).mean()) < 4 * error
    assert first.unique().numel() > 0.95 * count  # numbers have 24 bits


def test_numbers_are_splitmix64_through_the_inverse_cdf():
    """The numbers are compared with plain Python integers. The literals fix the meaning of a seed, as another generator
    would change every experiment.
    """
    indices, seed_key, mask = [0, 1, 2, 5_000_000_000], key_of_parameter(0, "output.weight"), (1 << 64) - 1
    expected = []
    for index in indices:
        z = (index * 0x9E3779B97F4A7C15 + seed_key) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        uniform = (((z ^ (z >> 31)) >> 40) + 0.5) / 2**24
        low = NormalDist().cdf(-3)
        expected.append(0.02 * NormalDist().inv_cdf(low + uniform * (1 - 2 * low)))
    assert expected == pytest.approx([-0.010361945, -0.020585872, -0.020197447, -0.045235346], rel=1e-6)
    numbers = normal(torch.tensor(indices), Normal(0.02, cut=3.0), seed_key)
    assert numbers.tolist() == pytest.approx(expected, rel=1e-6)


def test_mup_draws_the_same_numbers_with_other_deviations(tiny):
    """Hidden matrices and routers shrink with the width, and a block begins as the base's block at its depth does."""
    config = tiny(dim=64, n_layers=4)
    mup = from_dict(Parametrization, {"name": "mup", "base_dim": 16, "base_head_dim": None, "base_layers": 2})
    model, like = build(config, 32), build(dataclasses.replace(config, dim=16, head_dim=config.head_width), 32)
    init_weights(model, config, 7, rules_of(config, mup))
    std = {name: like.initial_distribution(name, like.config) for name in dict(like.named_parameters())}
    for name, parameter in model.named_parameters():
        base = std[
            name.replace("layers.1.", "layers.0.").replace("layers.2.", "layers.1.").replace("layers.3.", "layers.1.")
        ]
        if isinstance(base, Normal):
            expected = base.std / (2 if name.startswith("layers.") else 1)
            drawn = normal(torch.arange(parameter.numel()), Normal(1.0, base.cut), key_of_parameter(7, name))
            torch.testing.assert_close(parameter.flatten(), drawn * expected)
        else:
            assert torch.equal(parameter, torch.full_like(parameter, base))


def test_a_model_without_a_place_for_a_scale_is_refused(tiny):
    config = tiny(dim=64)
    mup = from_dict(Parametrization, {"name": "mup", "base_dim": 16, "base_head_dim": None, "base_layers": 1})
    model = build(config, 32)
    model.layers["0"] = torch.nn.Module()
    model.layers["0"].attention = torch.nn.Module()
    with pytest.raises(ConfigError, match=r"model\.family=llama3: a Module has no branch_scale"):
        init.scale_forward(model, config, rules_of(config, mup))
