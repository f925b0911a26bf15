"""Share helpers among the tests of conversions: models whose logits depend on all parts, `titan checkpoint`, and a
comparison of folders with transformers.
"""

import argparse
import json

import pytest
import torch
import torch.distributed.checkpoint as dcp

from titan_hydra import cli
from titan_hydra.core.job.config import to_dict
from titan_hydra.core.models import build
from titan_hydra.core.models.init import init_weights


def loud_model(config):
    """Return a model whose logits visibly depend on attention, positions, norms, experts and biases."""
    model = build(config, 128)
    init_weights(model, config, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.layers.state_dict().items():
        if name.endswith("router.bias"):
            tensor.copy_(torch.rand(tensor.shape, generator=generator) - 0.5)
        else:
            tensor.mul_(5 if tensor.dim() > 1 else 1 + torch.rand(tensor.shape, generator=generator))
    return model


def save_run(model, config, run, step=10, **others):
    """Write a run's directory with one checkpoint of the model and of the other given values."""
    folder = run / f"checkpoints/step-{step:08d}"
    dcp.save({"model": model.state_dict()} | others, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)
    (run / "config.json").write_text(json.dumps({"model": to_dict(config)}))


def titan_checkpoint(verb, *words):
    parser = argparse.ArgumentParser()
    add_arguments, main = cli.COMMANDS[f"checkpoint {verb}"].functions()
    add_arguments(parser)
    assert main(parser.parse_args([str(word) for word in words])) == 0


def exported(config, folder, dtype="float32"):
    """Return a loud model and its Hugging Face folder."""
    model = loud_model(config)
    save_run(model, config, folder / "run")
    titan_checkpoint("export", folder / "run", folder / "hf", "--dtype", dtype)
    return model, folder / "hf"


def some_tokens():
    return torch.randint(0, 99, (2, 128), generator=torch.Generator().manual_seed(1))


def assert_transformers_agrees(model, folder, kind):
    """Check that transformers loads all tensors of a folder into a model of this class, and computes the same logits."""
    transformers = pytest.importorskip("transformers")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert type(theirs).__name__ == kind
    assert not any(info.values()), info
    with torch.no_grad():
        torch.testing.assert_close(model(some_tokens()), theirs.eval()(some_tokens()).logits, atol=1e-5, rtol=0)


def load(model, checkpoint):
    """Load every tensor of a checkpoint into a model."""
    state = {"model": {name: torch.full_like(value, torch.nan) for name, value in model.state_dict().items()}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(checkpoint), no_dist=True)
    model.load_state_dict(state["model"])
    return model
