"""`titan compare` finds the step at which two runs begin to differ, and the module with a planted bug."""

import json
import re

import pytest

from titan_hydra import cli

TRACED = ("debug.trace_activations=true", "gpus=2", "parallelism=fsdp", "steps=3")
OTHER_EPS = """
build = loop.build
def planted(job, device):
    made = build(job, device)
    dict(made.model.named_modules())["layers.1.attention_norm"].eps = 1e-3
    return made
loop.build = planted
"""
WRONG_BACKWARD = """
import torch
from torch import nn
class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient): return gradient * 100
build = loop.build
def planted(job, device):
    made = build(job, device)
    module = dict(made.model.named_modules())["layers.0.feed_forward.w1"]
    forward = module.forward
    module.forward = lambda x: forward(Wrong.apply(x))
    return made
loop.build = planted
"""


@pytest.fixture
def compare(launcher, capsys):
    def run(a="a", b="b"):
        runs = [str(next((launcher.folder / name).iterdir())) for name in (a, b)]
        assert cli.main(["compare", *runs]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("planted", "module", "step", "losses"),
    [
        (OTHER_EPS, "layers.1.attention_norm: its inputs are the same, its outputs differ", 1, "other bits from step "),
        pytest.param(
            WRONG_BACKWARD,
            "layers.0.feed_forward.w1, in its backward",
            1,
            "other bits from step 2: ",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_planted_bug_is_found_at_its_module(launcher, compare, planted, module, step, losses):
    assert launcher.run(*launcher.TINY, *TRACED, "paths.runs=a").returncode == 0
    launcher.sabotage(planted)
    assert launcher.run(*launcher.TINY, *TRACED, "paths.runs=b").returncode == 0
    said = compare()
    assert f"modules: first differ at step {step}, on ranks 0, 1: {module}" in said
    assert f"loss: {losses}" in said and " learning" not in said


def test_equal_runs_and_untraced_ones(launcher, compare, capsys):
    for name, more in [
        ("a", ("debug.trace_activations=true",)),
        ("b", ("debug.trace_activations=true",)),
        ("c", ("optimizer.lr=1e-3",)),
    ]:
        assert launcher.run(*launcher.TINY, "steps=2", "cluster=inline", f"paths.runs={name}", *more).returncode == 0
    said = compare()
    assert "loss: the same bits in all of them" in said and "modules: the same bits in all 2 traced steps" in said
    said = compare("a", "c")
    assert ["optimizer.lr", "0.002", "0.001", "learning"] in [line.split() for line in said.splitlines()]
    assert "modules: B traced no activations" in said
    assert cli.main(["compare", "xx", "yy", "--runs", str(launcher.folder / "a")]) == 2
    assert "xx: no such run" in capsys.readouterr().err


def test_the_pages_lines_of_pandas_read_what_a_run_writes(launcher, monkeypatch, capsys):
    """The lines of docs/when-it-fails.md print the spikes, and the gradient norms of a step by parameter, the largest
    first.
    """
    assert launcher.run(*launcher.TINY, *TRACED, "metrics.log_every=1").returncode == 0
    run = launcher.run_directory
    spikes, norms = re.findall(
        r"```python\n(import pandas.*?)```", (launcher.ROOT / "docs/when-it-fails.md").read_text(), re.S
    )
    file = run / "metrics.jsonl"
    last = json.loads(file.read_text().splitlines()[-1])
    rows = [last | {"step": step, "grad_norm": 9.0 if step == 7 else 1.0} for step in range(4, 12)]
    file.write_text(file.read_text() + "".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(run)
    exec(spikes, {})
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["7"]
    found = {}
    exec(norms, found)
    table = found["norms"]
    assert (
        list(table.columns) == [1, 2, 3] and "layers.1.attention.wq.weight" in table.index and (table > 0).all().all()
    )
