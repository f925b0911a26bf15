"""Products in NVFP4: the numbers of torchao's casts, unbiased noise, the rotation, and what is refused."""

import pytest
import torch

from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.kernels.nvfp4 import NVFP4Product, round_nvfp4, round_squares, signs_of, turn_by_hadamard
from titan_hydra.core.parallel import formats
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.experiments.compose.compose import compose_job, compose_unchecked

NVFP4 = ("precision=nvfp4", "data=synthetic", "model=llama3_debug")


def drawn(*shape, dtype=torch.float32, seed=0):
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=made) * torch.randn(shape, generator=made).exp()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_torchao_rounds_them(dtype):
    pytest.importorskip("torchao")
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = drawn(48, 64, dtype=dtype)
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.float().abs().max())).dequantize()
    torch.testing.assert_close(
        round_nvfp4(x).float(), theirs.float(), rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=0
    )
    assert not round_nvfp4(torch.zeros(16, 16)).any()


def test_a_weight_is_rounded_alike_along_rows_and_columns():
    weight = drawn(64, 32)
    assert torch.equal(round_squares(weight), round_squares(weight.t().contiguous()).t())
    one = weight[:16, :16].clone()  # a square of 16 x 16 has one scale, so at most 15 values
    assert len(round_squares(one).unique()) <= 15


def test_stochastic_rounding_is_unbiased_and_repeats():
    x = torch.full((4096, 16), 1.0)
    x[:, 1:] = 2.7  # 2.7 / 0.45 is no number of E2M1 here: the largest of the tensor is 6 times a scale
    x[:, 0] = 6.0
    x[:, 1:] += torch.linspace(0, 1e-3, 4096)[:, None]
    rounded = round_nvfp4(x, stochastic=True)
    assert len(rounded[:, 1:].unique()) == 2 and len(round_nvfp4(x)[:, 1:].unique()) == 1
    assert rounded[:, 1:].mean().item() == pytest.approx(x[:, 1:].mean().item(), rel=5e-3)
    assert torch.equal(rounded, round_nvfp4(x, stochastic=True))


def test_the_rotation_is_the_hadamard_matrix_with_signs():
    signs = signs_of(3)
    matrix = torch.ones(1, 1)
    while len(matrix) < 16:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), matrix)
    x, y = drawn(8, 32), drawn(8, 32, seed=1)
    torch.testing.assert_close(turn_by_hadamard(x, signs), ((x.view(8, 2, 16) * signs) @ matrix / 4).flatten(1))
    torch.testing.assert_close(turn_by_hadamard(x, signs) @ turn_by_hadamard(y, signs).t(), x @ y.t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_near_the_exact_one(dtype):
    x, weight, gradient = (drawn(*shape, dtype=dtype) for shape in ((256, 128), (64, 128), (256, 64)))
    x.requires_grad_(), weight.requires_grad_()
    y = NVFP4Product.apply(x, weight, signs_of(0))
    found = [y, *torch.autograd.grad(y, (x, weight), gradient)]
    exact = [x @ weight.t(), gradient @ weight, gradient.t() @ x]
    for one, other in zip(found, exact, strict=True):
        error = (one - other).float().norm() / other.float().norm()
        assert one.dtype == dtype and 0.01 < error < 0.25, error


@pytest.mark.parametrize(
    ("words", "key", "code", "legal"),
    [
        (("model.dim=192",), "model.dim", "widths_suit_the_format", "128 or 256"),
        (("gpus=2", "parallelism=tp"), "parallelism.tp", "tensor_parallel_takes_the_format", "1"),
        (("precision.compute_dtype=float32",), "precision.compute_dtype", "format_suits_the_job", "bfloat16"),
        (("precision.emulate=true", "compile=block"), "precision.emulate", "emulation_is_eager", "False"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_the_start(words, key, code, legal):
    faults = check(freeze(compose_unchecked(*NVFP4, "data.seq_len=128", *words)))
    assert [(fault.key, fault.code, " or ".join(map(str, fault.legal))) for fault in faults] == [(key, code, legal)]


@pytest.mark.parametrize(("capability", "runs"), [(None, False), ((9, 0), False), ((10, 0), True), ((12, 0), False)])
def test_hardware_without_the_format_is_refused(monkeypatch, capability, runs):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    job = compose_job(*NVFP4)
    with torch.device("meta"):
        model = models.build(job.model, job.data.seq_len)

    def made():
        device = torch.device("cuda" if capability else "cpu")
        return formats.convert(model, job, Mesh(job.parallelism, None, None, None, None), device)

    if runs:
        assert made()[0].startswith("nvfp4: ")
        return
    with pytest.raises(
        ConfigError, match=r"precision=nvfp4: NVFP4 matmuls need .*10\.0.* nearest legal: precision=float8"
    ):
        made()
