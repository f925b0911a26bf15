"""Folders of the hub, whose experts are a tensor each, are read, and written as they were."""

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.recipes.transformers.families import FAMILIES, folder_of, job
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.convert import export_hf
from titan_hydra.core.checkpoint.folder import Folder, load_hf
from titan_hydra.core.job.run.checkpoints import newest
from titan_hydra.core.models.hf import hf_of, meta_state
from titan_hydra.recipes.transformers.known import library_config

ONE = ("parallelism=single", "data.local_batch=8")
LAYOUTS = {
    "single": ONE,
    "fsdp 2": ("gpus=2", "parallelism=fsdp", "data.local_batch=4"),
    "tp 2": ("gpus=2", "parallelism=tp", "data.local_batch=8", "parallelism.sequence_parallel=false"),
}
# model_type: a name in a folder of the hub
HUB = {
    "qwen3_moe": "model.layers.1.mlp.experts.3.gate_proj.weight",
    "mixtral": "model.layers.1.block_sparse_moe.experts.3.w1.weight",
    "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj_bias",
    "gemma3_text": "model.layers.1.self_attn.q_norm.weight",
}


def saved_folder(kind, root, hub=True, dtype=torch.bfloat16, **changed):
    """Save a tiny model as transformers does, in the names of the hub or in those that it has in memory."""
    folder = folder_of(kind, root, **changed)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(library_config(job(folder, *ONE).model), dtype=dtype)
    model.save_pretrained(folder, save_original_format=hub)
    return folder, model


def weights_of(folder):
    return load_file(folder / "model.safetensors")


def assert_as_it_was(exported, folder):
    """The two folders have the same tensors, bit by bit, and the same config.json, but for token ids
    that are null there, as a run may add its own."""
    ours, theirs = weights_of(exported), weights_of(folder)
    assert ours.keys() == theirs.keys()
    assert [name for name, tensor in theirs.items() if ours[name].dtype != tensor.dtype] == []
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []
    said, wanted = (json.loads((place / "config.json").read_text()) for place in (exported, folder))
    unset = [name for name in ("bos_token_id", "eos_token_id", "pad_token_id") if wanted.get(name) is None]
    ours, theirs = ({name: one[name] for name in one if name not in unset} for one in (said, wanted))
    assert ours == theirs
    tokens = torch.arange(40).view(2, 20)
    logits = [AutoModelForCausalLM.from_pretrained(place)(tokens).logits for place in (exported, folder)]
    assert torch.equal(*logits)


@pytest.mark.parametrize(
    ("kind", "hub", "layout"),
    [(kind, hub, layout) for kind in HUB for hub in (True, False) for layout in ("fsdp 2", "tp 2")],
    ids=lambda value: {True: "hub", False: "memory"}.get(value, value),
)
def test_a_run_exports_the_folder_from_which_it_started(kind, hub, layout, tmp_path, run_job):
    """A run without learning, in bfloat16 and sharded, has the folder's weights, names, shapes, dtypes and config.json."""
    folder, _ = saved_folder(kind, tmp_path, hub)
    assert (HUB[kind] in weights_of(folder)) is (hub or kind in ("gpt_oss", "gemma3_text"))
    still = ("optimizer.lr=0", "steps=1", "checkpoint=sync", "precision=bf16", f"checkpoint.initial_load_path={folder}")
    directory = run_job(job(folder, *still, *LAYOUTS[layout]))
    export_hf(newest(directory / "checkpoints"), tmp_path / "exported", torch.bfloat16)
    assert_as_it_was(tmp_path / "exported", folder)


@pytest.mark.parametrize("hub", [True, False], ids=["hub", "memory"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_part_of_a_tensor_is_found(kind, hub, tmp_path):
    """Any box of any tensor is what transformers loads there, and the tensors that are written are the folder's."""
    folder, model = saved_folder(kind, tmp_path, hub, torch.float32)
    config = job(folder, *ONE).model
    opened, state, whole = Folder(folder, hf_of(config)), meta_state(config), model.state_dict()
    written, draw = {}, random.Random(1)
    for fqn in opened.dtypes(state):
        expected = whole[opened.hf.name(fqn)]
        for _ in range(5):
            box = [sorted(draw.sample(range(size + 1), 2)) for size in expected.shape]
            target = torch.empty([end - start for start, end in box])
            opened.read(fqn, expected.shape, [start for start, _ in box], target)
            assert torch.equal(target, expected[tuple(slice(*ends) for ends in box)]), fqn
        written |= opened.hf.parts(fqn, expected)
    found = weights_of(folder)
    assert written.keys() == found.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in found.items())


def test_random_weights_are_exported_in_the_names_of_the_hub(tmp_path, run_job):
    folder = folder_of("qwen3_moe", tmp_path)
    directory = run_job(job(folder, "checkpoint=sync", "steps=1", *ONE))
    export_hf(newest(directory / "checkpoints"), tmp_path / "exported")
    assert HUB["qwen3_moe"] in weights_of(tmp_path / "exported")
    AutoModelForCausalLM.from_pretrained(tmp_path / "exported")


def damaged(folder, change):
    weights = weights_of(folder)
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda weights: weights.pop(HUB["qwen3_moe"]), f"has no {HUB['qwen3_moe']}"),
        (lambda weights: weights.update({HUB["qwen3_moe"]: torch.zeros(3, 64)}), "(3, 64); the model needs (32, 64)"),
        (lambda weights: weights.update({"model.layers.1.mlp.experts.4.up_proj.weight": torch.zeros(32, 64)}), "no place in the model"),
    ],
    ids=["missing", "shape", "one too many"],
)  # fmt: skip
def test_a_folder_that_lacks_a_tensor_is_refused_before_the_start(change, part, tmp_path):
    folder, _ = saved_folder("qwen3_moe", tmp_path)
    words = (f"checkpoint.initial_load_path={folder}", *ONE)
    job(folder, *words)
    damaged(folder, change)
    with pytest.raises(ConfigError) as error:
        job(folder, *words)
    lines = str(error.value).splitlines()
    assert len(lines) == 1
    assert lines[0].startswith(f"checkpoint.initial_load_path={folder}: ")
    assert part in lines[0]


def test_a_tensor_that_is_not_in_boxes_is_refused_before_the_start(tmp_path, monkeypatch):
    """transformers builds some models' tensors by permutations, which no shard can read by itself."""
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    folder, _ = saved_folder("llama", tmp_path)
    turned = WeightConverter(["self_attn.q_proj.weight"], ["self_attn.q_proj.weight"], [Transpose(0, 1)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda *_, **__: [turned])
    damaged(folder, lambda weights: weights.update({"x": weights.pop("model.layers.0.self_attn.q_proj.weight")}))
    with pytest.raises(ConfigError, match=r"Transpose makes model\.layers\.0\.self_attn\.q_proj"):
        job(folder, f"checkpoint.initial_load_path={folder}", *ONE)


def test_an_experts_value_that_is_not_finite_is_named(tmp_path):
    folder, _ = saved_folder("qwen3_moe", tmp_path)
    damaged(folder, lambda weights: weights[HUB["qwen3_moe"]].fill_(torch.nan))
    config = job(folder, *ONE).model
    from titan_hydra.core.models import build

    with torch.device("meta"):
        ours = build(config, 8)
    ours.to_empty(device="cpu")
    with pytest.raises(ConfigError, match=HUB["qwen3_moe"]):
        load_hf(ours, config, folder)
