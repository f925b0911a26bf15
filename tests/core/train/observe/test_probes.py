"""Test what probes see, and that they change nothing."""

import json

import torch
from torch import nn

from titan_hydra.core.train.observe import probes


def test_tracing_changes_no_bit_and_writes_every_module(run_job, tiny):
    plain = run_job(tiny("parallelism=fsdp", "gpus=2", "steps=2", "checkpoint=off"))
    traced = run_job(
        tiny("parallelism=fsdp", "gpus=2", "steps=2", "checkpoint=off", "debug.trace_activations=true", "name=traced")
    )
    assert run_job.losses(plain) == run_job.losses(traced)
    assert run_job.losses(plain, "grad_norm") == run_job.losses(traced, "grad_norm")
    for rank in range(2):
        rows = [json.loads(line) for line in (traced / f"attempts/1/activations_{rank}.jsonl").read_text().splitlines()]
        looks = {(row["pass"], row["what"], row["module"]) for row in rows if row["step"] == 2}
        assert {
            ("forward", "in", "layers.0.attention.wq"),
            ("forward", "out", "layers.1"),
            ("backward", "in", "layers.1.ffn_norm"),
            ("backward", "out", "tok_embeddings"),
            ("gradient", "", "output.weight"),
        } <= looks
        assert not any("rotary" in module for _, _, module in looks)


def test_a_checksum_sees_every_bit():
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = torch.randn(13, 7).to(dtype)
        original = probes.marks(tensor).tolist()
        assert probes.marks(tensor.clone()).tolist() == original
        for place in range(tensor.numel()):
            changed = tensor.clone()
            bits = changed.view(probes.INTEGERS[changed.element_size()]).flatten()
            bits[place] ^= 1
            assert probes.marks(bits.view(dtype).reshape(13, 7)).tolist()[1:] != original[1:]
        assert probes.marks(tensor.flip(0)).tolist()[1:] != original[1:]


def test_each_module_sees_its_own_share_of_a_gradient():
    """Two modules share an input, and only the backward of the second one produces a NaN."""

    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("nan")

    class Breaks(nn.Module):
        def forward(self, x):
            return Bad.apply(x)

    model = nn.ModuleDict({"fine": nn.Linear(2, 2), "breaks": Breaks()})
    seen = {}
    probes.hook(
        model, lambda when, what, name, tensor: seen.update({(when, what, name): tensor.isfinite().all().item()})
    )
    x = torch.ones(2, requires_grad=True)
    (model["fine"](x) + model["breaks"](x)).sum().backward()
    assert seen == {
        (when, what, name): (when, what, name) != ("backward", "in", "breaks")
        for when in ("forward", "backward")
        for what in ("in", "out")
        for name in ("fine", "breaks")
    }
