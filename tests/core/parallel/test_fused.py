"""Test Float8 with our own kernels: scales, accuracy compared with torchao's, and which linears are cast together."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.kits.sizes import BASE
from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import from_dict
from titan_hydra.core.job.config.schema import ActivationCheckpoint, Compile
from titan_hydra.core.kernels import float8 as reference
from titan_hydra.core.kernels.float8_units import Float8Linears
from titan_hydra.core.models import layers
from titan_hydra.core.parallel import activation_checkpoint, compile, formats
from titan_hydra.core.parallel.formats import fused
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.experiments.compose.compose import compose_job, later_wins

EMULATED = ("precision=float8_emulate",)
FUSED = (*EMULATED, "precision.kernels=fused")
WIDE = ("model.dim=256", "model.n_layers=1", "model.ffn_dim=768", "data.seq_len=128")
E4M3 = torch.float8_e4m3fn


def job_of(*overrides):
    """Return a job of the acceptance matrix's model."""
    return compose_job(*later_wins(*BASE, *overrides))


def alone(job):
    """Return the mesh of one process."""
    return Mesh(job.parallelism, None, None, None, None)


def converted(job):
    """Return the whole model with the job's format, on the meta device, and the lines for the log."""
    with torch.device("meta"):
        model = models.build(job.model, job.data.seq_len)
    return model, formats.convert(model, job, alone(job), torch.device("cpu"))


def test_scales_are_torchaos_powers_of_two():
    from torchao.float8.float8_utils import amax_to_scale

    edges = torch.tensor([0.0, 1e-30, 1e-12, 1.0, 1.75, 448.0, 3e38])
    maxima = torch.cat([edges, edges.nextafter(torch.tensor(torch.inf)), torch.rand(100_000).mul(60).sub(40).exp2()])
    scale, inverse = reference.scales_of(maxima.view(torch.int32))
    exact = torch.exp2(torch.floor(torch.log2(448.0 / maxima.double().clamp(min=1e-12)))).float()
    assert torch.equal(scale, exact)
    assert torch.equal(scale * inverse, torch.ones_like(scale))
    # torchao computes the logarithm in float32, which rounds up just below a power of two.
    assert (scale != amax_to_scale(maxima, E4M3, True)).sum() <= 3
    assert reference.scales_of(torch.tensor([torch.inf, torch.nan]).view(torch.int32))[0].isnan().all()


def test_a_row_that_is_not_finite_stays_so_and_the_others_are_unharmed():
    x = torch.randn(4, 32)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    y = Float8Linears.apply(x, None, 0.0, True, torch.randn(16, 32))
    assert y[1:3].isnan().all() and y[[0, 3]].isfinite().all()


@pytest.mark.parametrize("norm", [True, False])
def test_the_matmul_of_a_gpu_gives_what_its_emulation_does(norm):
    """torch 2.13 supports this matmul on CPUs too, although slowly."""
    torch.manual_seed(0)
    leaves = [
        torch.randn(4, 64, 256),
        torch.rand(256) if norm else None,
        *(torch.randn(height, 256) / 16 for height in (256, 64, 64)),
    ]
    leaves = [leaf if leaf is None else leaf.bfloat16().requires_grad_() for leaf in leaves]
    d, results = torch.randn(4, 64, 384).bfloat16(), []
    for emulate in (True, False):
        try:
            y = Float8Linears.apply(*leaves[:2], 1e-5, emulate, *leaves[2:])
        except RuntimeError as error:
            if "per-tensor scaling for CPU" not in str(error):
                raise
            pytest.skip(f"torch {torch.__version__} has no matmul with scales of rows on CPUs")
        results.append([y, *torch.autograd.grad(y, [leaf for leaf in leaves if leaf is not None], d)])
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found, exact, rtol=0.01, atol=1e-3)


def block_of(job, seed):
    """Return a block with random weights in the job's compute dtype, and its rotary table."""
    model, _ = converted(job)
    block = model.layers["0"].to_empty(device="cpu").to(getattr(torch, job.precision.compute_dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + drawn / 10 if "norm" in name else drawn * parameter.shape[-1] ** -0.5)
    return block, model.rotary_table()


def gradients_of(job, seed):
    """Return the output of the block's branches, the gradient that they add to the input's gradient, and the weights'
    gradients.
    """
    block, rotary = block_of(job, seed)
    generator = torch.Generator().manual_seed(seed + 100)
    x = torch.randn(4, 128, 256, generator=generator) * 3 * torch.rand(256, generator=generator)
    d = torch.randn(4, 128, 256, generator=generator) * torch.rand(4, 128, 1, generator=generator)
    x, d = (tensor.to(next(block.parameters()).dtype) for tensor in (x, d))
    x.requires_grad_()
    y = block(x, rotary)
    y.backward(d)
    weights = {name: parameter.grad.double() for name, parameter in block.named_parameters()}
    return {"y": (y - x).detach().double(), "dx": (x.grad - d).double(), **weights}


def errors(found, exact):
    """Return the relative error of each tensor."""
    return {name: ((found[name] - exact[name]).norm() / exact[name].norm()).item() for name in exact}


@pytest.mark.parametrize(("dtype", "more"), [("float32", 1.01), ("bfloat16", 1.05)])
def test_a_block_is_as_near_to_float32_as_torchaos(dtype, more):
    """This compares the mean over four seeds, as the error of a single tensor varies by some percent with the seed."""
    exact = [gradients_of(job_of(*WIDE), seed) for seed in range(4)]
    mean = {}
    for name, precision in (("torchao", EMULATED), ("fused", FUSED)):
        job = job_of(*WIDE, *precision, f"precision.compute_dtype={dtype}")
        each = [errors(gradients_of(job, seed), exact[seed]) for seed in range(4)]
        mean[name] = {tensor: sum(one[tensor] for one in each) / 4 for tensor in each[0]}
    print(
        dtype,
        *(
            f"{tensor}: torchao {error:.4f} fused {mean['fused'][tensor]:.4f};"
            for tensor, error in mean["torchao"].items()
        ),
    )
    for tensor, error in mean["torchao"].items():
        assert 0.05 < mean["fused"][tensor] <= more * error, tensor
    assert sum(mean["fused"].values()) <= 1.005 * sum(mean["torchao"].values())


def test_what_a_block_saves_has_no_float8_copies():
    """The block has Llama 3.1 8B's proportions and is not compiled. Unlike fused kernels, bf16 and torchao save the
    results of norms, SiLU and gating.
    """
    saved = {}
    for name, precision in (("bf16", ("precision=bf16",)), ("torchao", EMULATED), ("fused", FUSED)):
        block, rotary = block_of(job_of(*WIDE, "model.n_kv_heads=2", "model.ffn_dim=896", *precision), 0)
        own = {tensor.untyped_storage().data_ptr() for tensor in (*block.parameters(), rotary)}
        bytes_of = {}

        def keep(tensor, own=own, bytes_of=bytes_of):
            if (storage := tensor.untyped_storage()).data_ptr() not in own:
                bytes_of[storage.data_ptr()] = storage.nbytes()
            assert tensor.dtype != E4M3
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            block(torch.randn(1, 128, 256).bfloat16().requires_grad_(), rotary)
        saved[name] = sum(bytes_of.values()) / 128 / 256
    print("bytes a token and unit of width:", saved)
    assert saved["fused"] < 0.5 * saved["bf16"] <= 0.5 * saved["torchao"]


def test_linears_that_read_the_same_input_are_cast_together_and_the_report_names_them():
    model, (first, second) = converted(job_of(*FUSED))
    assert first.startswith("float8 rowwise, fused (emulated): 28 linears converted")
    assert second == (
        "cast together: layers.*.attention.wq+wk+wv after attention_norm x4, "
        "layers.*.feed_forward.w1+w3+w2 after ffn_norm x4; each by itself: layers.*.attention.wo x4"
    )
    assert isinstance(model.layers["0"].ffn_norm, fused.DeferredNorm) and type(model.norm) is nn.RMSNorm


@pytest.mark.parametrize(
    ("overrides", "together", "single"),
    [
        (
            ("precision.skip=[output,wk]",),
            "cast together: layers.*.feed_forward.w1+w3+w2 after ffn_norm x4;",
            "attention.wv x4",
        ),
        (("model=qwen3_moe_debug",), "wq+wk+wv after attention_norm", "attention.wo"),
        (
            ("model=deepseek_v3_debug", "model.n_kv_heads=8"),
            "w1+w3+w2 after ffn_norm, layers.*.feed_forward.shared_experts",
            "attention.wkv_a",
        ),
    ],
)
def test_what_cannot_be_cast_together_is_cast_by_itself(overrides, together, single):
    _, (_, line) = converted(job_of(*FUSED, *overrides))
    assert together in line and single in line.partition("each by itself: ")[2]


def test_a_subclass_that_may_compute_something_else_is_not_fused(monkeypatch):
    class Other(layers.FeedForward):
        def forward(self, x):
            return self.w2(self.w1(x).relu() * self.w3(x))

    monkeypatch.setattr(layers, "FeedForward", Other)
    model, (_, line) = converted(job_of(*FUSED))
    assert "feed_forward.w1 x4" in line.partition("each by itself: ")[2]
    assert type(model.layers["0"].ffn_norm) is nn.RMSNorm and type(model.layers["0"].feed_forward) is Other


def test_without_triton_they_are_refused_and_not_slow(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fused, "find_spec", lambda name: None)
    job = job_of("precision=float8_rowwise", "precision.kernels=fused")
    with torch.device("meta"):
        model = models.build(job.model, job.data.seq_len)
    with pytest.raises(ConfigError, match=r"precision\.kernels=fused: the package triton.*nearest legal: torchao"):
        formats.convert(model, job, alone(job), torch.device("cuda"))


@pytest.mark.parametrize("ac", ["none", "full", "op", "lean"])
def test_equal_blocks_are_compiled_once_and_without_a_break(ac):
    torch.compiler.reset()
    counter, job = CompileCounterWithBackend("aot_eager"), job_of(*FUSED)
    model, _ = converted(job)
    job = replace(job, ac=from_dict(ActivationCheckpoint, {"name": ac}), compile=Compile("block", counter))
    activation_checkpoint.apply(model, alone(job), job)
    compile.apply(model, alone(job), job)
    model.to_empty(device="cpu").bfloat16()
    for _ in range(2):
        model(torch.zeros(2, 32, dtype=torch.int64)).sum().backward()
    assert counter.frame_count == 1
    torch.compiler.reset()


def test_a_rank_with_fused_kernels_imports_no_torchao():
    code = """import sys, torch
from titan_hydra.core import models
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.core.parallel import formats
from titan_hydra.core.parallel.mesh import Mesh
job = compose_job("precision=float8_emulate", "precision.kernels=fused", "parallelism=single", "data=synthetic")
with torch.device("meta"):
    model = models.build(job.model, 16)
formats.convert(model, job, Mesh(job.parallelism, None, None, None, None), torch.device("cpu"))
model.to_empty(device="cpu")(torch.zeros(1, 16, dtype=torch.int64)).sum().backward()
formats.before_forward(model, job)
assert "torchao" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True)
