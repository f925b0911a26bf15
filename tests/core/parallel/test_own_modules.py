"""Techniques that replace or wrap modules leave a user's modules unchanged, or refuse the job before anything is built."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.models.layers import SDPA
from titan_hydra.core.parallel import activation_checkpoint, compile, context, formats, lora, loss_head, tensor
from titan_hydra.core.parallel.mesh import Mesh
from titan_hydra.experiments.compose.compose import compose_job

SMALL = (
    "model=qwen3_debug",
    "model.n_layers=1",
    "model.dim=128",
    "model.ffn_dim=256",
    "model.vocab_size=64",
    "data=synthetic",
    "data.seq_len=32",
    "precision=fp32",
)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Capped(nn.Linear):
    def forward(self, x):
        return 30 * torch.tanh(super().forward(x) / 30)


class GemmaNorm(nn.RMSNorm):
    def forward(self, x):
        return F.rms_norm(x, self.normalized_shape, 1 + self.weight, self.eps)


class Window(SDPA):
    def forward(self, q, k, v, documents=None):
        seq = torch.arange(q.shape[2])
        return super().forward(q, k, v, (seq[:, None] - seq).lt(8).tril()[None, None])


def job_of(*words):
    return compose_job(*SMALL, *words)


def model_of(job, device="meta"):
    with torch.device(device):
        model = models.build(job.model, job.data.seq_len)
    return model, model.layers["0"]


def alone(job):
    return Mesh(job.parallelism, None, None, None, None)


@pytest.mark.parametrize(
    "words",
    [
        ("precision=float8_emulate",),
        ("precision=float8_emulate", "precision.kernels=fused"),
        ("precision=mxfp8", "precision.emulate=true"),
    ],
)
def test_a_linear_with_a_forward_of_its_own_keeps_its_format(words):
    job = job_of("data.seq_len=128", *words)
    model, block = model_of(job)
    block.attention.wo = Doubled(128, 128, bias=False, device="meta")
    block.attention_norm = GemmaNorm(128, device="meta")
    report = "\n".join(formats.convert(model, job, alone(job), torch.device("cpu")))
    assert type(block.attention.wo) is Doubled and "forward" not in vars(block.attention.wo) and "a Doubled" in report
    assert type(block.attention_norm) is GemmaNorm and "after attention_norm" not in report


def test_mxfp8_keeps_a_bias():
    pytest.importorskip("torchao")
    job = job_of("precision=mxfp8", "precision.emulate=true")
    model, block = model_of(job, "cpu")
    block.attention.wo = nn.Linear(128, 128)
    nn.init.zeros_(block.attention.wo.weight)
    formats.convert(model, job, alone(job), torch.device("cpu"))
    torch.testing.assert_close(block.attention.wo(torch.randn(1, 32, 128))[0, 0], block.attention.wo.bias)


def test_an_adapter_keeps_a_bias_and_refuses_a_forward_of_its_own():
    job = job_of("adapter=lora", "adapter.linears=[wo]")
    model, block = model_of(job, "cpu")
    block.attention.wo = plain = nn.Linear(128, 128)
    x = torch.randn(2, 128)
    expected = plain(x)
    lora.apply(model, alone(job), job)
    plain.lora_a, plain.lora_b = (
        nn.Parameter(torch.zeros(shape)) for shape in ((job.adapter.rank, 128), (128, job.adapter.rank))
    )
    torch.testing.assert_close(plain(x), expected)
    model, block = model_of(job)
    block.attention.wo = Doubled(128, 128, bias=False, device="meta")
    with pytest.raises(ConfigError, match=r"adapter=lora: .* a Doubled; nearest legal: none"):
        lora.apply(model, alone(job), job)


@pytest.mark.parametrize("head", [Capped(128, 64, bias=False), nn.Linear(128, 64)], ids=["soft cap", "bias"])
def test_a_head_that_computes_more_than_a_matmul_is_not_joined_with_the_loss(head):
    job = job_of("loss=linear_cross_entropy")
    model, _ = model_of(job)
    model.output = head
    with pytest.raises(ConfigError, match=r"loss=linear_cross_entropy: .*; nearest legal: cross_entropy"):
        loss_head.convert(model, job.loss)


def test_tensor_parallelism_knows_every_module_or_refuses(world):
    job = job_of("parallelism=tp", "gpus=2")
    mesh = world(job.parallelism)
    model, block = model_of(job)
    block.ffn_norm = GemmaNorm(128, device="meta")
    with pytest.raises(ConfigError, match=r"parallelism.tp=2: the style Norm .* a GemmaNorm; nearest legal: 1"):
        tensor.apply(model, mesh, job)
    model, block = model_of(job)
    block.attention.gate = nn.Linear(128, 128, device="meta")
    with pytest.raises(
        ConfigError, match=r"parallelism.tp=2: .* no style for layers\.0\.attention\.gate\.weight; nearest legal: 1"
    ):
        tensor.apply(model, mesh, job)


@pytest.mark.parametrize("rotate", ["allgather", "alltoall", "ulysses"])
def test_a_ring_refuses_an_attention_kernel_that_it_would_replace(world, rotate):
    job = job_of("parallelism=cp", "gpus=2", f"parallelism.cp_rotate={rotate}")
    mesh = world(job.parallelism)
    model, block = model_of(job)
    block.attention.sdpa = own = Window("auto")
    if rotate == "ulysses":
        context.apply(model, mesh, job)
        assert block.attention.sdpa.sdpa is own
    else:
        with pytest.raises(
            ConfigError, match=rf"cp_rotate={rotate}: a ring replaces .* a Window, by torch's; nearest legal: ulysses"
        ):
            context.apply(model, mesh, job)
    model, block = model_of(job)
    block.attention = nn.Linear(128, 128, device="meta")
    with pytest.raises(
        ConfigError, match=r"parallelism.cp=2: block 0 of qwen3 has no child called sdpa.*; nearest legal: 1"
    ):
        context.apply(model, mesh, job)


def own_model(words):
    """Return a job, and its model, whose norms and attention kernel are a user's."""
    torch.manual_seed(0)
    job = job_of("parallelism=single", *words)
    model, block = model_of(job, "cpu")
    block.ffn_norm, block.attention.sdpa = GemmaNorm(128), Window("auto")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return job, model


def gradients_of(words):
    job, model = own_model(words)
    for technique in (activation_checkpoint, compile):
        technique.apply(model, alone(job), job)
    tokens = torch.arange(64).view(2, 32) * 7 % 64
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    "words",
    [("ac=full",), ("ac=op",), ("compile=block",), ("compile=block", "ac=op")],
    ids=lambda words: " ".join(words),
)
def test_a_users_norm_and_kernel_learn_under_a_technique_what_they_learn_alone(words):
    torch.compiler.reset()
    expected = gradients_of(())
    found = gradients_of((*words, *["compile.backend=aot_eager"] * ("compile=block" in words)))
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    torch.compiler.reset()


class Chatty(GemmaNorm):
    def forward(self, x):
        print("here")
        return super().forward(x)


def test_a_users_block_that_is_no_single_graph_is_named_with_its_line():
    torch.compiler.reset()
    job, model = own_model(("compile=block", "compile.backend=aot_eager"))
    model.layers["0"].ffn_norm = Chatty(128)
    compile.apply(model, alone(job), job)
    line = r"^compile.name=block: a block of qwen3 is more than one graph: .*print.* \(.*own_modules.py, line \d+\); nearest legal: off$"
    with pytest.raises(ConfigError, match=line), compile.breaks_refused(job):
        model(torch.zeros(1, 32, dtype=torch.int64))
    torch.compiler.reset()
