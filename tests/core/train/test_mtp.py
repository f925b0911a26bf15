"""Multi-token prediction: what it is on layouts is compared by the cases "mtp" of titan verify."""

import numpy as np
import pytest
import torch

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.models import build
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.train.objectives import build_objective
from titan_hydra.core.train.objectives.language import IGNORED, further
from titan_hydra.experiments.plan.memory import peak
from titan_hydra.experiments.plan.time import speed

DEEPSEEK = ("model=deepseek_v3_debug", "model.n_layers=2", "model.n_kv_heads=4", "parallelism=single", "data=synthetic")


def test_labels_ahead_stay_within_their_document():
    arrays = {
        "tokens": np.array([[10, 11, 12, 13, 14]]),
        "labels": np.array([[11, 12, IGNORED, 14, 15]]),
        "documents": np.array([[0, 0, 0, 1, 1]]),
    }
    found = further(arrays, 2)
    assert found["ahead"][0].T.tolist() == [[11, 12, 13, 14, 0], [12, 13, 14, 0, 0]]
    no = IGNORED
    assert found["ahead_labels"][0].T.tolist() == [[12, no, no, 15, no], [no, no, no, no, no]]


def test_a_model_in_use_is_that_without_further_predictions(tiny):
    models = []
    for mtp in (0, 2):
        job = tiny(*DEEPSEEK, f"model.mtp={mtp}")
        model = build(job.model, job.data.seq_len)
        init_weights(model, job.model, 1)
        models.append((job, model))
    (_, plain), (job, model) = models
    assert {name for name, _ in plain.named_parameters()} < {name for name, _ in model.named_parameters()}
    objective = build_objective(job)
    batch = objective.example(2).tensors
    batch["tokens"] = torch.arange(batch["tokens"].numel()).view(batch["tokens"].shape) % job.model.vocab_size
    batch |= {"labels": batch["tokens"], "ahead_labels": batch["ahead_labels"].clamp(min=0)}
    first, others = objective.inputs(batch)
    model.eval()
    assert torch.equal(model(first, **others), plain(first))
    held_out = objective.measure(model(first, **others), batch)
    model.train()
    assert len(model(first, **others)) == 3 * len(first)
    assert objective.loss(model(first, **others), batch) > held_out


@pytest.mark.parametrize(
    "words",
    [
        ("parallelism=pp", "gpus=2"),
        ("loss=linear_cross_entropy",),
        ("adapter=lora",),
        ("parametrization=mup",),
        ("objective=sft", "data=embedded_chat"),
    ],
)
def test_what_further_predictions_cannot_be_combined_with_is_refused(tiny, words):
    with pytest.raises(ConfigError, match=r"model\.mtp"):
        tiny(*DEEPSEEK, "model.mtp=1", *words)


def test_a_plan_counts_blocks_and_logits(tiny):
    jobs = [tiny(*DEEPSEEK, "hardware=h100", f"model.mtp={mtp}") for mtp in (0, 1)]
    with torch.device("meta"):
        counts = [sum(one.numel() for one in build(job.model, 8).parameters()) for job in jobs]
    terms = [{term.name: term.bytes for term in peak(job).terms} for job in jobs]
    assert [term["weights"] for term in terms] == [4 * count for count in counts]
    assert terms[1]["head and loss"] == pytest.approx(2 * terms[0]["head and loss"], rel=0.1)
    assert speed(jobs[1]).parts["head and loss"] == 2 * speed(jobs[0]).parts["head and loss"]
