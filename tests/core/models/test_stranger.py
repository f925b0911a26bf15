"""Add a model family in an empty folder, as docs/extend.md explains: it is refused where it must be, equal on every
layout, and can be converted.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.kits import forked
from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import from_dict, identity, to_dict
from titan_hydra.core.job.config.family import FAMILIES, Family
from titan_hydra.core.job.config.registry import register
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.models import build
from titan_hydra.core.models.init import init_weights
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.instruments.verify.case import LAYOUTS_IN_BF16, case, in_bf16
from titan_hydra.instruments.verify.command_verify import whole_matrix
from titan_hydra.instruments.verify.coverage import covered
from titan_hydra.instruments.verify.matrix import MATRIX
from titan_hydra.instruments.verify.verify import job_of, verify

ROOT = Path(__file__).parents[3]
OF_SQUARED = ("train.imports=[squared]", "model=qwen3_debug", "model.family=squared")
BARE = '''"""A family with nothing but a model."""
from squared import SquaredConfig

from titan_hydra.core.models import Family, register

register(Family("bare", SquaredConfig, model="squared.model:Squared"))
'''
WINDOWED = '''"""Attention of a sliding window, whose kernel takes masks."""
import torch
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.kernels.documents import document_mask
from titan_hydra.core.models import Family, register
from titan_hydra.core.models.layers import SDPA, Decoder

register(Family("windowed", Model, model="windowed:Windowed"))


class Window(SDPA):
    def forward(self, q, k, v, documents=None):
        tokens = torch.arange(q.shape[2])
        near = (tokens[:, None] - tokens).lt(8).tril()[None, None]
        return super().forward(q, k, v, near if documents is None else near & documents)


class Windowed(Decoder):
    def __init__(self, config, seq_len):
        super().__init__(config, seq_len)
        for block in self.layers.values():
            block.attention.sdpa = Window(config.attention)

    def documents(self, ends, h):
        return document_mask(ends, self.seq_len)
'''
# A copy of Window with a key of its own; and an attention that is wrong on several ranks, which shows only if the
# window hides some tokens.
KEYED = '''"""Attention of a sliding window that is a key."""
from dataclasses import dataclass
import torch
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.models import Family, register
from titan_hydra.core.models.layers import SDPA, Decoder


@dataclass
class KeyedConfig(Model):
    sliding_window: int = key(64, "tokens that attention sees")
    wrong: bool = key(False, "a window on one rank alone")


register(Family("keyed", KeyedConfig, model="keyed:Keyed"))


class Window(SDPA):
    def forward(self, q, k, v, documents=None):
        near = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        if not self.wrong or torch.distributed.get_world_size() == 1:
            near = near.triu(1 - self.width)
        return super().forward(q, k, v, near[None, None])


class Keyed(Decoder):
    def __init__(self, config, seq_len):
        super().__init__(config, seq_len)
        for block in self.layers.values():
            block.attention.sdpa = Window(config.attention)
            block.attention.sdpa.width, block.attention.sdpa.wrong = config.sliding_window, config.wrong
'''
OF_KEYED = ("train.imports=[keyed]", "model=qwen3_debug", "model.family=keyed", "model.n_layers=2")
OF_WINDOWED = ("train.imports=[windowed]", "model=qwen3_debug", "model.family=windowed", "model.n_layers=2")
LAYOUTS = {
    "fsdp 2": (2, "parallelism=fsdp", "data.local_batch=8"),
    "tp 2": (2, "parallelism=tp", "data.local_batch=16"),
    "pp 2": (2, "parallelism=pp", "data.local_batch=16"),
    "cp 2": (2, "parallelism=cp", "data.local_batch=16"),
    "fsdp_tp 4": (4, "parallelism=fsdp_tp", "parallelism.tp=2", "data.local_batch=8"),
    "fsdp_pp 4": (4, "parallelism=fsdp_pp", "data.local_batch=8"),
    "tp 2 without sequence parallel": (2, "parallelism=tp", "parallelism.sequence_parallel=off", "data.local_batch=16"),
}


@pytest.fixture(scope="module")
def folder(user_modules):
    """Return a folder that contains only the files of docs/extend.md, on Python's path, and a family that lacks most
    parts.
    """
    text = (ROOT / "docs" / "extend.md").read_text()
    blocks = re.findall(r"`(squared/\w+\.py)`.*?```python\n(.*?)```", text, re.S)
    assert [name for name, _ in blocks] == [f"squared/{part}.py" for part in ("__init__", "model", "sharding", "hf")]
    return user_modules({**dict(blocks), "bare.py": BARE, "windowed.py": WINDOWED, "keyed.py": KEYED})


def launched(folder, *words):
    """Return the one line with which launch.py ends with status 2, before anything is written."""
    run = forked.run("launch.py", words, folder, os.environ)
    assert (run.returncode, run.stderr.count("\n")) == (2, 1), run.stdout + run.stderr
    assert not (folder / "runs").exists()
    return run.stderr


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["train.imports=[bare]", "model.family=bare", "parallelism=tp"],
            "parallelism.tp=2: family bare has no tensor-parallel sharding",
        ),
        (
            ["train.imports=[squared]", "model.family=squared", "model.heda_dim=64"],
            "model.heda_dim=64: no such key; one of model.head_dim",
        ),
        (["train.imports=[nowhere]"], "train.imports=[nowhere]: there is no module nowhere"),
        (
            ["train.imports=[squared]", "model.family=sqared"],
            "model.family=sqared: no such model; nearest legal: squared",
        ),
    ],
)
def test_what_a_stranger_gets_wrong_is_one_line_before_the_start(folder, words, line):
    assert line in launched(folder, "model=qwen3_debug", "gpus=2", *words)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("model.power=x", "model.power=x: "),
        ("model.power=9", "model.power=9.0: must be"),
        ("model.multiple_of=9", "model.multiple_of=9: no such key"),
        ("model.powr=2", "model.powr=2: no such key; nearest legal: model.power"),
    ],
)
def test_its_key_is_typed_and_bounded(folder, words, line):
    with pytest.raises(ConfigError) as error:
        compose_job(*OF_SQUARED, words)
    assert line in str(error.value) and "\n" not in str(error.value)


def test_its_key_is_part_of_the_run(folder):
    jobs = [compose_job(*OF_SQUARED, f"model.power={power}") for power in ("2", "2.0", "3")]
    assert [job.model.power for job in jobs] == [2.0, 2.0, 3.0]
    hashes = [identity(job) for job in jobs]
    assert hashes[0] == hashes[1] != hashes[2]
    assert from_dict(Job, json.loads(json.dumps(to_dict(jobs[2])))) == jobs[2]


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("import torch_of_another_name", "ModuleNotFoundError: No module named 'torch_of_another_name'"),
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_a_fault(folder, code, line):
    name = f"broken_{len(code)}"
    (folder / f"{name}.py").write_text(code)
    with pytest.raises(
        ConfigError, match=rf"train.imports=\[{name}\]: {name} cannot be imported.*{re.escape(line)}"
    ) as error:
        compose_job(f"train.imports=[{name}]")
    assert "\n" not in str(error.value)
    assert ("where torch may be missing" in str(error.value)) == ("torch" in code)


def test_a_name_is_given_once():
    register(FAMILIES["llama3"])
    with pytest.raises(ConfigError, match="taken"):
        register(Family("llama3", FAMILIES["llama3"].config, model="squared.model:Squared"))


def test_six_layouts_learn_what_one_process_learns(folder):
    base = (*OF_SQUARED, "model.head_dim=16", "model.power=3")
    cases = [case(name, ranks, *words, base=base, gradients=2e-5) for name, (ranks, *words) in LAYOUTS.items()]
    cases += in_bf16("squared", *base, layouts=LAYOUTS_IN_BF16[:2], gradients=2e-2)
    for outcome in verify(cases, steps=2):
        assert outcome.passed, outcome


def test_a_ring_refuses_a_kernel_of_ones_own_in_one_line(folder, tmp_path):
    line = ("parallelism=cp", "gpus=2", "steps=1", "data=synthetic", "data.seq_len=64", "precision=fp32")
    run = forked.run("launch.py", [*OF_WINDOWED, *line, f"paths.runs={tmp_path}"], folder, os.environ)
    said = run.stdout + run.stderr
    assert (
        run.returncode == 2
        and "a ring replaces the attention kernel of windowed, a Window, by torch's; nearest legal: ulysses" in said
    )
    assert "Traceback" not in said, said


def test_a_kernel_of_ones_own_learns_under_ulysses_what_one_process_learns(folder):
    ulysses = ("parallelism=cp", "parallelism.cp_rotate=ulysses", "data.local_batch=16")
    packed = ("model.vocab_size=4096", "data=embedded", "data.document_mask=true")
    plain = case("windowed, cp 2, ulysses", 2, *ulysses, base=OF_WINDOWED)
    documents = case("windowed, cp 2, ulysses, documents", 2, *ulysses, base=(*OF_WINDOWED, *packed))
    for outcome in verify([plain, documents], steps=2):
        assert outcome.passed, outcome


def test_cases_that_a_family_cannot_run_are_counted(folder):
    """Cases of experts have keys that this family lacks, float64 supports only the package's families, and this family
    has no tensor parallelism.
    """
    names = (
        "qwen3_moe, fsdp 2, ep 2, ac op",
        "deepseek_v3, single, accumulation 4",
        "qwen3, single, against float64",
        "tp 2, ac op",
        "fsdp 2",
        "cp 2, ulysses, document mask",
        "fsdp 4, tp 2, muon",
    )
    found = covered(
        [case for case in MATRIX if case.name in names or case.name.startswith("tp 2, ac op")], OF_KEYED, None, 2
    )
    assert [case.name for case in found.cases] == ["fsdp 2", "cp 2, ulysses, document mask"]
    assert [job_of(case).data.seq_len for case in found.cases] == [32 + 128, 256], "twice the window, and more"
    assert found.lines(2, 365) == [
        "covers 2 of the 7 chosen of 365 cases; 5 left out: 2 have keys that the model has not, 3 are refused; sequences are longer than "
        "twice model.sliding_window=64",
        "     2  parallelism.tp=2: family keyed has no tensor-parallel sharding",
        "     1  model.family=keyed: has no float64 reference; only the package's own families have one",
        "     1  model.q_lora_rank=24: no such key",
        "     1  model.expert_dim=64: no such key",
    ]
    with pytest.raises(ConfigError, match=r"^model.sliding_window=400: hides nothing .*; nearest legal: 256"):
        covered(MATRIX[:1], (*OF_KEYED, "model.sliding_window=400"), None, 2)
    with pytest.raises(ConfigError, match=r"^none of 1 case can run: model.sliding_widow=8: no such key$"):
        covered(MATRIX[:1], (*OF_KEYED, "model.sliding_widow=8"), None, 2)


def test_a_window_that_only_one_process_has_is_found(folder, capsys, monkeypatch):
    """With sequences shorter than the window there would be no difference. Ring attention refuses this attention kernel
    on the ranks; such refusals are counted too.
    """
    monkeypatch.setattr("titan_hydra.instruments.verify.verify.STEPS", 2)
    words = ["verify", *OF_KEYED, "--ranks", "2", "--only"]
    assert cli.main([*words, "in order, sequence 16", "--list"]) == 0
    assert (
        capsys.readouterr().out
        == "  2  cp 2, allgather in order, sequence 16\n  2  cp 2, alltoall in order, sequence 16\n"
    )
    assert cli.main([*words, "alltoall in order, sequence 16"]) == 2
    shown = capsys.readouterr()
    assert (
        f"covers 0 of the 1 chosen of {len(whole_matrix())} cases; 1 left out: 0 have keys that the model has not, 1 are refused; "
        in shown.out
    )
    assert (
        "a ring replaces the attention kernel of keyed, a Window, by torch's\n" in shown.out
        and "Traceback" not in shown.err
    )
    assert cli.main([*words, "ulysses, sequence 16", "model.wrong=true"]) == 1
    assert re.search(r"^cp 2, ulysses, sequence 16 .* NO$", capsys.readouterr().out, re.M)


@pytest.mark.slow
def test_it_trains_and_learns_on_two_ranks(folder, tmp_path):
    words = [
        *OF_SQUARED,
        "precision=fp32",
        "gpus=2",
        "steps=20",
        "data.seq_len=64",
        "optimizer.lr=3e-3",
        f"paths.runs={tmp_path}",
    ]
    run = subprocess.run(
        [sys.executable, ROOT / "launch.py", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", run.stdout)]
    assert losses[-1] < losses[0] - 0.5


def test_convert_goes_both_ways(folder, tmp_path):
    job = compose_job(*OF_SQUARED, "model.n_layers=2", "model.dim=64", "model.power=3")
    model = build(job.model, 8)
    init_weights(model, job.model, seed=0)
    step = tmp_path / "run/checkpoints/step-00000001"
    dcp.save({"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter(step), no_dist=True)
    (tmp_path / "run/config.json").write_text(json.dumps(to_dict(job) | {"tokenizer": None}))
    convert("export", tmp_path / "run", tmp_path / "hf", "--dtype", "float32")
    assert json.loads((tmp_path / "hf/config.json").read_text())["power"] == 3
    convert("import", tmp_path / "hf", tmp_path / "back", "--imports", "squared")
    state = {"model": {name: torch.empty_like(value) for name, value in model.state_dict().items()}}
    dcp.load(state, storage_reader=dcp.FileSystemReader(tmp_path / "back"), no_dist=True)
    for name, value in model.state_dict().items():
        assert torch.equal(state["model"][name], value), name
    assert json.loads((tmp_path / "back/config.json").read_text())["model"]["power"] == 3


def test_a_family_without_names_there_is_not_converted(folder, tmp_path):
    job = compose_job("train.imports=[bare]", "model=qwen3_debug", "model.family=bare")
    step = tmp_path / "checkpoints/step-00000001"
    dcp.save({"model": {}}, storage_writer=dcp.FileSystemWriter(step), no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(to_dict(job)))
    with pytest.raises(ConfigError, match=r"model\.family=bare: has no Hugging Face format"):
        convert("export", tmp_path, tmp_path / "hf")


def convert(verb, *words):
    parser = argparse.ArgumentParser()
    add_arguments, main = cli.COMMANDS[f"checkpoint {verb}"].functions()
    add_arguments(parser)
    assert main(parser.parse_args([str(word) for word in words])) == 0
