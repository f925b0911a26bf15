"""Products of experts in MXFP8: their numbers, which modules get them, and where they are refused."""

import pytest
import torch

from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.kernels.grouped import grouped_matmul
from titan_hydra.core.kernels.mxfp8 import through_torchao
from titan_hydra.core.models import moe
from titan_hydra.core.parallel import formats
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked

pytest.importorskip("torchao")
SPARSE = ("model=qwen3_moe_debug", "data=synthetic", "precision=mxfp8_experts")
EMULATED = (*SPARSE, "precision.emulate=true")


def drawn(dtype, experts=3, rows=70):
    """Return rows, weights and a gradient. Their range is wide, as scales are powers of two, which change the rounding of
    values alone that are small beside the largest of their block.
    """
    torch.manual_seed(0)
    tensors = [
        torch.randn(shape) * (4 * torch.randn(shape)).exp() for shape in ((rows, 64), (experts, 96, 64), (rows, 96))
    ]
    rows, weights, gradient = (tensor.to(dtype) for tensor in tensors)
    return rows.requires_grad_(), weights.requires_grad_(), gradient


def converted(*words, experts=None, device="cpu"):
    job = compose_job(*words)
    with torch.device("meta"):
        model = models.build(job.model, job.data.seq_len)
    if experts:
        model.layers["0"].feed_forward.experts.__class__ = experts
    lines = formats.convert(model, job, Mesh(job.parallelism, None, None, None, None), torch.device(device))
    return model, "\n".join(lines)


def test_the_emulation_has_the_bits_of_torchaos():
    """The reference is the function that runs on a Blackwell GPU, with padded groups of rows but other kernels."""
    from torchao.quantization.quantize_.common import KernelPreference

    rows, weights, gradient = drawn(torch.bfloat16)
    ends = torch.tensor([20, 20, 70], dtype=torch.int32)  # the second expert has no rows
    ours = grouped_matmul(rows, weights, ends, "mxfp8 emulated")
    theirs = through_torchao(rows, weights.transpose(-2, -1), ends, KernelPreference.EMULATED)
    assert torch.equal(ours, theirs) and not torch.equal(ours, grouped_matmul(rows, weights, ends, ""))
    of_rows, of_weights = torch.autograd.grad(theirs, (rows, weights), gradient)
    for mine, other in zip(torch.autograd.grad(ours, (rows, weights), gradient), (of_rows, of_weights), strict=True):
        assert torch.equal(mine, other)
    with torch.no_grad():  # what the backward calls on a GPU
        assert torch.equal(of_rows, through_torchao(gradient, weights, ends, KernelPreference.EMULATED))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_rows_beside_it(dtype):
    rows, weights, _ = drawn(dtype, 1)
    whole = grouped_matmul(rows, weights, torch.tensor([70], dtype=torch.int32), "mxfp8 emulated")
    some = grouped_matmul(rows[7:20], weights, torch.tensor([13], dtype=torch.int32), "mxfp8 emulated")
    torch.testing.assert_close(some, whole[7:20], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "linears", "experts"), [(EMULATED, False, True), ((*EMULATED, "precision.converts=both"), True, True)]
)
def test_what_is_converted_is_chosen_and_reported(words, linears, experts):
    model, report = converted(*words)
    blocks = model.layers.values()
    assert all((block.feed_forward.experts.format == "mxfp8 emulated") is experts for block in blocks)
    assert all(("forward" in vars(block.attention.wq)) is linears for block in blocks)
    assert "feed_forward.experts" in report and ("attention.wq" in report.partition(" not: ")[0]) is linears


def test_experts_with_a_forward_of_their_own_and_skipped_ones_are_left():
    class Own(moe.Experts):
        def forward(self, *args):
            return super().forward(*args)

    model, report = converted(*EMULATED, "precision.skip=[layers.1.]", experts=Own)
    formats = [block.feed_forward.experts.format for block in model.layers.values()]
    assert formats == ["", "", *["mxfp8 emulated"] * (len(formats) - 2)]
    assert "an Own, " in report.replace("a Own", "an Own") and "precision.skip" in report


def test_a_torchao_without_the_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    monkeypatch.setattr("titan_hydra.core.base.private.mxfp8_kernels", False, raising=False)
    with pytest.raises(ConfigError, match=r"precision.converts=experts: .* no MXFP8 kernels .* nearest legal: linears"):
        converted(*SPARSE, device="cuda")
    monkeypatch.setattr("titan_hydra.core.base.private.mxfp8_kernels", True, raising=False)
    assert "mxfp8: " in converted(*SPARSE, device="cuda")[1]


@pytest.mark.parametrize(
    ("words", "key", "code", "legal"),
    [
        (("model.expert_dim=48",), "model.expert_dim", "format_suits_the_job", "32 or 64"),
        (("model.dim=80",), "model.dim", "widths_suit_the_format", "64 or 96"),
        (
            ("gpus=2", "parallelism=tp", "precision.converts=both"),
            "parallelism.tp",
            "tensor_parallel_takes_the_format",
            "1",
        ),
        (("gpus=2", "parallelism=tp"), None, None, None),
    ],
)
def test_what_cannot_be_combined_is_refused_before_the_start(words, key, code, legal):
    faults = check(freeze(compose_unchecked(*EMULATED, "data.seq_len=64", *words)))
    assert [(fault.key, fault.code, " or ".join(map(str, fault.legal))) for fault in faults] == (
        [(key, code, legal)] if key else []
    )


@pytest.mark.parametrize("format", ["", "mxfp8 emulated"])
def test_frozen_weights_have_no_gradient_and_rows_the_same_one(format):
    rows, weights, gradient = drawn(torch.float32)
    ends = torch.tensor([20, 20, 70], dtype=torch.int32)
    of_rows, _ = torch.autograd.grad(grouped_matmul(rows, weights, ends, format), (rows, weights), gradient)
    alone = torch.autograd.grad(grouped_matmul(rows, weights.detach(), ends, format), rows, gradient)[0]
    assert torch.equal(of_rows, alone)
