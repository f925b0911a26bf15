"""Experts of transformers that are split over ranks learn what they learn in one process."""

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.recipes.transformers.families import CASE, differences, folder_of, job, traced
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.instruments.verify.verify import exact
from titan_hydra.recipes.transformers.config import WITH_EXPERTS
from titan_hydra.recipes.transformers.experts import route_experts

ONE = ("parallelism=single", "data.local_batch=8")
TP = ("parallelism=fsdp_tp", "parallelism.tp=2", "parallelism.sequence_parallel=false")
EP = ("parallelism=fsdp", "parallelism.ep=2")
ULYSSES = ("parallelism=cp", "parallelism.cp_rotate=ulysses")
LAYOUTS = {  # by the number of ranks
    2: {
        "ep 2": ("gpus=2", *EP, "data.local_batch=4"),
        "ep 2, accumulation, ac full": ("gpus=2", *EP, "data.local_batch=2", "ac=full"),
        "ep 2, ac op": ("gpus=2", *EP, "data.local_batch=4", "ac=op"),
        "cp 2, ep 2": ("gpus=2", *ULYSSES, "parallelism.ep=2", "data.local_batch=8"),
        "ep 2, bf16": ("gpus=2", *EP, "data.local_batch=4", "precision=bf16"),
    },
    4: {
        "fsdp 4, ep 2": ("gpus=4", *EP, "data.local_batch=2"),
        "fsdp 4, ep 4, bf16": ("gpus=4", "parallelism=fsdp", "parallelism.ep=4", "data.local_batch=2", "precision=bf16"),
        "hsdp 4, ep 2": ("gpus=4", "parallelism=hsdp", "parallelism.ep=2", "data.local_batch=2"),
        "fsdp 2, cp 2, ep 4": ("gpus=4", *ULYSSES, "parallelism.dp_shard=2", "parallelism.cp=2", "parallelism.ep=4", "data.local_batch=2"),
        "pp 2, ep 2": ("gpus=4", "parallelism=fsdp_pp", "parallelism.pp=2", "parallelism.ep=2", "data.local_batch=4"),
    },
}  # fmt: skip


def assert_split_experts_learn_the_same(kinds, root, layouts):
    for kind in kinds:
        changed = {"num_hidden_layers": 2, "tie_word_embeddings": False}
        folder = folder_of(kind, root, **changed)
        expected = exact(job(folder, *ONE), CASE)
        alone = traced(
            root, 1, {name: job(folder, *ONE, *words) for name, words in ((kind, ()), ("half", ("precision=bf16",)))}
        )
        rounded = differences(alone["half"], expected)
        for ranks, words in layouts.items():
            for name, found in traced(root, ranks, {name: job(folder, *own) for name, own in words.items()}).items():
                half = "bf16" in name
                bounds = (0.2, 5e-4, 2e-2) if half else (1e-5, 1e-6, 1e-4)
                limits = {"losses": bounds[1], "norms": bounds[2]}
                for key, off in differences(found, expected).items():
                    assert off <= max(limits.get(key, bounds[0]), 1.5 * rounded[key] * half), (kind, name, key, off)
                assert all(torch.equal(alone[kind]["start"][key], value) for key, value in found["start"].items()), name
                assert (found["drift"], found["rounded"]) == (0, 0), name


def test_experts_are_split_over_two_ranks(tmp_path):
    assert_split_experts_learn_the_same(("gpt_oss",), tmp_path, {2: {"ep 2": LAYOUTS[2]["ep 2"]}})


def test_split_experts_of_every_family_learn_the_same(tmp_path):
    assert_split_experts_learn_the_same(WITH_EXPERTS, tmp_path, LAYOUTS)


@pytest.mark.parametrize(
    ("words", "key"),
    [
        ((*TP, "gpus=4", "parallelism.ep=2"), "parallelism.ep"),
        ((*EP, "gpus=2", "compile=block"), "compile"),
        ((*EP, "gpus=10", "data.global_batch=10"), "parallelism.ep"),  # two experts, 64 and 192 wide, over five ranks
        (("parallelism=fsdp", "gpus=3", "parallelism.ep=3", "data.global_batch=6"), "parallelism.ep"),
    ],
)  # fmt: skip
def test_what_split_experts_cannot_be_combined_with_is_refused(tmp_path, words, key):
    with pytest.raises(ConfigError, match=rf"^{key}"):
        job(folder_of("mixtral", tmp_path), "data.local_batch=1", *words)


def test_a_model_without_experts_has_none_to_split(tmp_path):
    with pytest.raises(ConfigError, match=r"parallelism\.ep"):
        job(folder_of("llama", tmp_path), "gpus=2", *EP, "data.local_batch=4")


def test_experts_without_tokens_have_gradients_of_zero():
    """All ranks take part in the reduction of gradients, those that no token was sent to as well."""
    experts = MixtralExperts(MixtralConfig(num_local_experts=2, hidden_size=8, intermediate_size=4))
    for weight in experts.parameters():
        torch.nn.init.normal_(weight)
    route_experts(torch.nn.ModuleList([torch.nn.ModuleDict({"experts": experts})]))
    nowhere = torch.empty(0, dtype=torch.int32)
    experts.exchange = lambda rows, plan, compute: (
        rows.repeat(2, 1) + compute(rows[:0], nowhere, nowhere, torch.zeros(1, dtype=torch.int32)).sum()
    )
    hidden = torch.ones(3, 8, requires_grad=True)
    experts(hidden, torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5)).sum().backward()
    assert all(weight.grad.count_nonzero() == 0 for weight in experts.parameters()) and hidden.grad.eq(1).all()
