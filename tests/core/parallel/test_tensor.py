"""Test tensor parallelism beyond the acceptance matrix: every parameter is in the plan, sums over ranks are exact, and
known faults of the compiler are avoided.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from titan_hydra.core import models
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.models.init import init_weights
from titan_hydra.core.parallel import build_mesh, compile, lora, tensor
from titan_hydra.core.parallel.gradients import gradient_norm
from titan_hydra.core.parallel.whole import Norm
from titan_hydra.core.train.objectives.language import cross_entropy
from titan_hydra.experiments.compose.compose import compose_job

SMALL = (
    "precision=fp32",
    "model.dim=32",
    "model.n_layers=2",
    "model.n_heads=8",
    "model.n_kv_heads=4",
    "model.vocab_size=63",
    "data=synthetic",
    "data.seq_len=16",
    "parallelism=tp",
    "gpus=2",
)


def split(*overrides):
    """Return a model on the meta device after `tensor.apply`, its mesh and its job."""
    job = compose_job(*SMALL, *overrides)
    with torch.device("meta"):
        model = models.build(job.model, job.data.seq_len)
    mesh = build_mesh(job.parallelism, "cpu")
    tensor.apply(model, mesh, job)
    return model, mesh, job


@pytest.fixture
def fake_world():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", ["true", "false"])
def test_every_parameter_is_in_the_plan(fake_world, tied):
    """A parameter that is not in the plan would be a plain tensor among DTensors. Only norms' parameters are copied;
    any other copied parameter should have been split.
    """
    model, _, _ = split(f"model.tie_embeddings={tied}")
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert parameter.placements[0].is_replicate() == ("norm" in name), name


def test_async_tensor_parallel_is_refused_on_a_cpu(fake_world):
    with pytest.raises(ConfigError, match=r"parallelism.async_tp=true: needs GPUs .*; nearest legal: false"):
        split("parallelism.async_tp=true", "compile=block")


def summed_norm_gradient(reduce_dtype):
    """Return the gradient of a bf16 norm's weight to which four ranks contribute 1, 2^-9, 2^-9 and 2^-9."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    norm = parallelize_module(
        nn.RMSNorm(4, eps=0.0, dtype=torch.bfloat16), mesh, Norm(split=True, reduce_dtype=reduce_dtype)
    )
    part = 1.0 if mesh.get_local_rank() == 0 else 2.0**-9
    norm(torch.ones(1, 1, 4, dtype=torch.bfloat16)).backward(torch.full((1, 1, 4), part, dtype=torch.bfloat16))
    assert norm.weight.grad.placements == (Replicate(),)
    return norm.weight.grad.to_local()


def test_a_norms_gradient_is_summed_over_ranks_in_the_reduce_dtype(on_ranks):
    """Above 1, bf16 numbers are 2^-7 apart. In fp32 the sum of the four parts is rounded up once; in bf16 each small
    part is lost (pytorch#190626).
    """

    def task(rank):
        assert (summed_norm_gradient(torch.float32) == 1 + 2.0**-7).all()
        assert (summed_norm_gradient(torch.bfloat16) == 1).any()

    on_ranks(4, task)


def summed_adapter_gradients(reduce_dtype):
    """Return the gradients of the adapters' matrices that every rank holds whole: A of a column linear, and B of a row
    linear. Four ranks contribute 1, 2^-9, 2^-9 and 2^-9.
    """
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    job = compose_job(
        "adapter=lora",
        "adapter.rank=1",
        "adapter.alpha=1",
        "precision=bf16_full",
        f"precision.reduce_dtype={reduce_dtype}",
    )
    part = torch.full((1, 1), 1.0 if mesh.get_local_rank() == 0 else 2.0**-9, dtype=torch.bfloat16)
    for split, name in ((0, "lora_a"), (1, "lora_b")):
        linear = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        linear.weight = nn.Parameter(
            distribute_tensor(linear.weight.detach(), mesh, [Shard(split)]), requires_grad=False
        )
        lora.adapt(linear, job)
        linear.to_empty(device="cpu")
        for parameter in linear.parameters():
            parameter.to_local().detach().fill_(1)
        if split == 0:  # x is whole, and each rank has a column of the output
            x = DTensor.from_local(torch.ones(1, 4, dtype=torch.bfloat16), mesh, [Replicate()])
            linear(x).to_local().backward(part)
        else:  # each rank has a column of x, and a term of the output's sum
            linear(DTensor.from_local(part, mesh, [Shard(1)])).to_local().sum(1).backward(
                torch.ones(1, dtype=torch.bfloat16)
            )
        gradient = linear.get_parameter(name).grad
        assert gradient.placements == (Replicate(),)
        yield gradient.to_local()


def test_adapters_gradients_are_summed_over_ranks_in_the_reduce_dtype(on_ranks):
    """There are four ranks, because the sum of two numbers is rounded once in either dtype."""

    def task(rank):
        assert all((gradient == 1 + 2.0**-7).all() for gradient in summed_adapter_gradients("float32"))
        assert all((gradient == 1).any() for gradient in summed_adapter_gradients("bfloat16"))

    on_ranks(4, task)


def test_the_embeddings_output_has_arrived(on_ranks):
    """If a compiled block gets a tensor whose communication has not finished, it crashes in the backward or gives the
    embedding a wrong gradient.
    """

    def task(rank):
        model, _, job = split()
        model.to_empty(device="cpu")
        init_weights(model, job.model, job.seed)
        output = model.tok_embeddings(torch.zeros(1, 16, dtype=torch.int64))
        assert type(output) is torch.Tensor
        assert output.shape == (1, 8, 32)
        assert output.requires_grad

    on_ranks(2, task)


@pytest.mark.slow
def test_compiled_code_of_another_rank_is_not_taken_from_the_cache(on_ranks, tmp_path, monkeypatch):
    """The loss on split logits depends on which part of the vocabulary its rank has, but the key of torch's cache does
    not.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))

    def task(rank):
        torch._inductor.config.compile_threads = 1
        job = compose_job(*SMALL, "compile=block")
        mesh = build_mesh(job.parallelism, "cpu")
        compile.apply(SimpleNamespace(layers={}), mesh, job)
        logits, labels = (
            torch.randn(2, 4, 16, generator=torch.Generator().manual_seed(0)),
            torch.arange(8).view(2, 4) * 2,
        )
        local = DTensor.from_local(
            logits.chunk(2, -1)[rank].contiguous(), mesh.world["tp"], [Shard(2)], run_check=False
        )
        for _ in range(2):  # the second time from the cache on disk
            torch.compiler.reset()
            with tensor.loss_context(mesh):
                loss = compile.function(cross_entropy, job.compile)(local, labels)
            torch.testing.assert_close(loss.to_local(), cross_entropy(logits, labels))
            dist.barrier()

    on_ranks(2, task)


def test_every_rank_knows_the_norm_of_the_whole_gradient(on_ranks):
    """The model has split, copied and plain gradients. The unevenly split gradient with three rows has rows on every
    rank, and each row counts only on the rank that holds it.
    """

    def task(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(1.0, 13.0).view(3, 4)
        parameters = []
        for placements in ([Shard(0), Shard(1)], [Replicate(), Shard(0)], [Replicate(), Replicate()]):
            parameter = nn.Parameter(torch.distributed.tensor.distribute_tensor(torch.zeros(3, 4), mesh, placements))
            parameter.grad = torch.distributed.tensor.distribute_tensor(whole.clone(), mesh, placements)
            parameters.append(parameter)
        plain = nn.Parameter(torch.zeros(3, 4))
        plain.grad = whole.clone()
        expected = torch.cat([whole.flatten()] * 4).norm()
        norm = gradient_norm([*parameters, plain])
        torch.testing.assert_close(norm, expected)
        for parameter in parameters:
            assert torch.equal(parameter.grad.full_tensor(), whole)  # the norm is measured, the gradient is not changed
        norms = [torch.zeros(()) for _ in range(4)]
        dist.all_gather(norms, norm)
        assert len({norm.item() for norm in norms}) == 1

    on_ranks(4, task)


@pytest.mark.parametrize("shape", [(0, 3), (5,), (1024,), (3, 4099), (2000, 2000)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_norm_is_exact_however_many_elements_there_are(shape, dtype, fake_world):
    parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
    parameter.grad = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    half = (parameter.grad.double().square().sum() / 2).sqrt().float()  # on this rank only, of two ranks
    torch.testing.assert_close(gradient_norm([parameter]), half, rtol=2e-7, atol=0)


def test_a_gradient_that_is_not_summed_yet_has_no_norm(fake_world):
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(DTensor.from_local(torch.zeros(2), mesh, [Replicate()]))
    parameter.grad = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    with pytest.raises(ValueError, match="unsummed"):
        gradient_norm([parameter])
