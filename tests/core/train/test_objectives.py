"""A user's objective, as in docs/extend.md, is refused where it must be, and equal on every layout."""

import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.kits import forked
from titan_hydra import cli
from titan_hydra.core import data, models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.data.batch import Batch, Dims
from titan_hydra.core.job.config import from_dict, identity, to_dict
from titan_hydra.core.job.config.registry import OBJECTIVES, ObjectiveKind, register, resolve
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.train.objectives import build_objective
from titan_hydra.core.train.observe.metrics import console_line
from titan_hydra.experiments.compose.compose import compose_job, later_wins
from titan_hydra.instruments.verify.case import LAYOUTS_IN_BF16, case, in_bf16
from titan_hydra.instruments.verify.verify import reference_of, verify

ROOT = Path(__file__).parents[3]
WEIGHTED = ("train.imports=[weighted]", "objective.name=weighted", "data=weighted_tokens")
LAYOUTS = {
    "accumulation 2": (1, "parallelism=single", "data.local_batch=8"),
    "fsdp 2": (2, "parallelism=fsdp", "data.local_batch=8"),
    "fsdp 2, accumulation 2": (2, "parallelism=fsdp", "data.local_batch=4"),
    "cp 2": (2, "parallelism=cp", "data.local_batch=16"),
    "cp 2, ulysses": (2, "parallelism=cp", "parallelism.cp_rotate=ulysses", "data.local_batch=16"),
    "tp 2": (2, "parallelism=tp", "parallelism.loss_parallel=off", "data.local_batch=16"),
    "pp 2": (2, "parallelism=pp", "data.local_batch=16"),
    "pp 2, zbv": (2, "parallelism=pp", "pp_schedule=zbv", "data.local_batch=16"),
    "compiled": (2, "parallelism=fsdp", "data.local_batch=8", "compile=block", "compile.backend=aot_eager"),
}


@pytest.fixture(scope="module")
def folder(user_modules):
    """Return a folder that contains only the modules of docs/extend.md, on Python's path."""
    blocks = re.findall(
        r"```(?:python|yaml)\n# ([\w/]*weighted\w*\.\w+)\n(.*?)```", (ROOT / "docs/extend.md").read_text(), re.S
    )
    assert [name for name, _ in blocks] == ["weighted.py", "weighted_on_ranks.py", "conf/data/weighted_tokens.yaml"]
    return user_modules(dict(blocks))


def job_of(folder, *words):
    """Return a small job with the user's objective; later options replace earlier ones."""
    return compose_job(*later_wins("debug=tiny", *WEIGHTED, *words), config_dir=folder / "conf")


def test_every_layout_learns_what_one_process_learns(folder):
    options = {"base": WEIGHTED, "gradients": 2e-5, "config_dir": folder / "conf"}
    cases = [case(name, ranks, *words, **options) for name, (ranks, *words) in LAYOUTS.items()]
    cases += in_bf16(
        "weighted", *WEIGHTED, "parallelism.loss_parallel=off", layouts=LAYOUTS_IN_BF16[:2], config_dir=folder / "conf"
    )
    for outcome in verify(cases, steps=2):
        assert outcome.passed, outcome


def test_its_loss_is_the_weighted_mean(folder, run_job):
    words = ("validation=on", "validation.steps=1", "optimizer.lr=0")
    job = reference_of(case("", 1, base=(*WEIGHTED, *words), config_dir=folder / "conf"), steps=1)
    directory = run_job(job)
    model = models.build(job.model, job.data.seq_len)
    init_weights(model, job.model, job.seed)
    for split, key in (("train", "loss"), ("validation", "validation_loss")):
        batch = data.build(job, 0, 1, split).next()
        with torch.no_grad():
            losses = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten(), reduction="none")
        expected = (losses * batch["weights"].flatten()).sum() / batch["weights"].sum()
        assert run_job.losses(directory, key)[1] == pytest.approx(expected.item(), rel=1e-5)
        assert abs(expected - losses.mean()) > 1e-4, "the weights change the loss"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["objective.name=wieghted"],
            f"objective.name=wieghted: not one of the choices; one of {', '.join(OBJECTIVES)}, weighted",
        ),
        (
            ["data=synthetic"],
            "data.name=synthetic: objective=weighted needs weights of each sample, which this source does not "
            "give; nearest legal: weighted_tokens",
        ),
        (
            ["loss=linear_cross_entropy"],
            "loss.name=linear_cross_entropy: objective=weighted needs the logits; nearest legal: cross_entropy",
        ),
        (["objective.power=0"], "objective.power=0.0: must be more than 0"),
        (
            ["objective.name=language", "objective.power=1"],
            "objective.power=1: objective.name=language does not read it; weighted would",
        ),
        (
            ["parallelism=tp"],
            "parallelism.loss_parallel=true: objective=weighted needs whole logits; nearest legal: false",
        ),
        (
            ["data.document_mask=true"],
            "data.document_mask=true: objective=weighted has no documents to separate; nearest legal: false",
        ),
    ],
)
def test_what_it_cannot_be_combined_with_is_one_line(folder, words, line):
    with pytest.raises(ConfigError) as error:
        job_of(folder, *words)
    assert str(error.value) == line


def test_it_is_part_of_the_run_and_the_default_is_not(folder):
    plain, weighted = compose_job("debug=tiny"), job_of(folder)
    assert plain.objective.name == "language" and identity(plain) != identity(weighted)
    assert from_dict(Job, json.loads(json.dumps(to_dict(weighted)))) == weighted


def test_its_shapes_are_enough_for_the_fake_world(folder, tmp_path):
    words = [
        "--config-dir=conf",
        "comm=fake",
        "debug=tiny",
        "precision=fp32",
        *WEIGHTED,
        "parallelism=cp",
        "parallelism.pp=2",
        "gpus=8",
        "parallelism.dp_shard=2",
        f"paths.runs={tmp_path}",
    ]
    run = forked.run("launch.py", words, folder, os.environ)
    assert run.returncode == 0, run.stdout + run.stderr


def test_a_name_is_given_once():
    register(OBJECTIVES["language"])
    with pytest.raises(ConfigError, match=r"objective\.name=language: this name is taken"):
        register(ObjectiveKind("language", "mine:Language"))


DIMS = {"tokens": Dims(sequence=1), "turned": Dims(1, sequence=0), "kinds": Dims(), "unused": Dims()}


def numbered() -> Batch:
    """Return a batch of 4 samples of 6 elements; the dimensions of one of its tensors are exchanged."""
    tokens = torch.arange(24).view(4, 6)
    return Batch({"tokens": tokens, "turned": tokens.T.contiguous(), "kinds": torch.arange(4)}, DIMS)


def test_a_batch_is_cut_along_the_dimensions_that_are_declared():
    batch = numbered()
    parts = batch.split(3)
    assert [part.samples for part in parts] == [3, 1]
    for part in [*parts, batch.of_sequences(lambda length: torch.tensor([length - 1, 0]))]:
        assert torch.equal(part["tokens"], part["turned"].T)
        assert torch.equal(part["tokens"][:, -1] // 6, part["kinds"])
    assert part["tokens"].tolist() == [[5, 0], [11, 6], [17, 12], [23, 18]]


def test_only_what_an_objective_reads_goes_to_the_device():
    """The number of each token's document, 8 bytes, would be as large as all the tokens; attention needs only the ends
    of documents.
    """
    device = torch.device("meta")
    for name, goes in (("language", False), ("sft", False), ("policy", False), ("dpo", True)):
        dims = resolve(OBJECTIVES[name].build).dims
        batch = Batch({key: torch.zeros(2, 6, dtype=torch.int64) for key in ("tokens", "documents", "ends")}, dims).to(
            device
        )
        assert batch.tensors.keys() == {"tokens", "ends"} | ({"documents"} if goes else set()), name
        assert {tensor.device for tensor in batch.tensors.values()} == {device}


def test_a_batch_that_does_not_fit_its_declaration_is_refused():
    with pytest.raises(ValueError, match="no dimensions are declared for other"):
        Batch({"tokens": torch.zeros(2, 6), "other": torch.zeros(2)}, DIMS)
    with pytest.raises(ValueError, match="different numbers of samples"):
        Batch({"tokens": torch.zeros(2, 6), "kinds": torch.zeros(3)}, DIMS)


def test_an_example_has_the_shapes_of_real_batches(folder):
    for job in (
        *(
            compose_job("debug=tiny", *words)
            for words in ((), ("data.document_mask=true",), ("parallelism=cp", "gpus=2"))
        ),
        job_of(folder),
    ):
        real, example = data.build(job, 0, 1).next(), build_objective(job).example(job.data.global_batch)
        assert real.tensors.keys() == example.tensors.keys()
        for name, tensor in real.tensors.items():
            dims = 1 if name == "ends" else None  # its width is the number of documents
            assert (tensor.shape[:dims], tensor.dtype) == (example[name].shape[:dims], example[name].dtype), name
            assert isinstance(np.asarray(tensor), np.ndarray), "in host memory"


def test_a_step_without_labels_has_no_loss(tiny, run_job, tmp_path):
    """The second batch of ids is nothing but ends of documents, of which none is learned with a mask."""
    ids = np.zeros(4 * 32 + 1, dtype=np.uint16)
    ids[:32] = ids[65:97] = np.arange(1, 33)
    ids.tofile(tmp_path / "x.bin")
    header = {"dtype": "uint16", "tokens": ids.size, "vocab_size": 64, "bos_id": None, "eos_id": 0}
    (tmp_path / "x.bin.json").write_text(json.dumps(header | {"tokenizer_sha256": None}))
    words = ("data=tokens", f"data.path={tmp_path}/x.bin", "data.document_mask=true", "data.shuffle=false", "steps=3")
    words += ("data.seq_len=32", "data.local_batch=1", "data.global_batch=1", "model.vocab_size=64", "validation=off")
    run = run_job(tiny(*words, "metrics.log_every=1"))
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] is None for row in rows] == [False, True, False]
    assert "loss - (mean -)" in console_line(rows[1], 3)
    assert cli.main(["report", str(run)]) == 0
