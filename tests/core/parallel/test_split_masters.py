"""Split masters: two halves together are one float32 number, and a step gives the same bits as with whole masters."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw

from tests.kits.sizes import BASE
from titan_hydra.core import data
from titan_hydra.core.base.private import foreach_copy
from titan_hydra.core.kernels import split_masters as kernel
from titan_hydra.core.kernels.split_masters import halves_of, join
from titan_hydra.core.parallel.masters import Masters
from titan_hydra.core.parallel.mesh import local_part
from titan_hydra.core.parallel.split_masters import master_of, split_masters
from titan_hydra.core.train.optimizer import set_lr, step
from titan_hydra.core.train.split_adamw import SplitAdamW
from titan_hydra.core.train.trainer import build
from titan_hydra.experiments.compose.compose import compose_job, later_wins

MILLION = 10**6
TIES = torch.tensor([0x3F808000, 0x3F818000, -0x407E8000, 0x7F7F8000, 0x00008000, 0x00018000]).int().view(torch.float32)


def any_floats(seed):
    """Return numbers with random bits (no NaN), and the hardest cases: ties, zeros, the largest and the smallest."""
    bits = torch.randint(
        -(2**31), 2**31, (MILLION + MILLION // 50,), generator=torch.Generator().manual_seed(seed)
    ).int()
    numbers = bits.view(torch.float32)
    edges = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.finfo().max, torch.finfo().min, torch.finfo().tiny, 1e-45]
    )
    return torch.cat([numbers[~numbers.isnan()], edges, TIES])


def same_bits(one, other):
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def test_halves_are_joined_to_the_same_bits():
    numbers = any_floats(0)
    weight, remainder = halves_of(numbers)
    assert weight.dtype == torch.bfloat16
    assert remainder.dtype == torch.int16
    assert same_bits(join(weight, remainder), numbers)


def test_the_upper_half_is_the_nearest_bfloat16():
    numbers = any_floats(1)
    ties = (numbers.view(torch.int32) & 0xFFFF) == 0x8000
    assert ties.any()
    weight, _ = halves_of(numbers)
    assert torch.equal(weight[~ties], numbers[~ties].bfloat16())
    assert (weight[ties].abs().double() >= numbers[ties].abs().double()).all()


def adamw_in_torch(master, gradient, mean, square, step, lr, beta1, beta2, eps, weight_decay, grad_scale):
    """Compute in torch, operation by operation, what the GPU kernel computes. On CPUs torch's float32 square root is
    not always the nearest number.
    """
    gradient = gradient.float() / grad_scale
    mean = mean + (gradient - mean) * (1 - beta1)
    square = square * beta2 + gradient * gradient * (1 - beta2)
    root = square.double().sqrt().float() / torch.tensor((1 - beta2**step) ** 0.5)
    return master * (1 - lr * weight_decay) - mean * torch.tensor(lr / (1 - beta1**step)) / (root + eps), mean, square


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kernel_of_a_gpu_has_the_bits_of_torch(dtype, monkeypatch):
    """In Triton's interpreter the kernel makes three steps, of which the second is skipped. The results of torch's
    fused kernel are close to the kernel's.
    """
    pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.manual_seed(0)
    options = {
        "lr": 1e-2,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "grad_scale": torch.tensor(3.0),
    }
    sizes, skipped = ((300, 40), (3000,), (7, 3)), (0.0, 1.0, 0.0)
    masters = [(torch.randn(size), torch.zeros(size), torch.zeros(size)) for size in sizes]
    ours, theirs = (
        [(*halves_of(master), mean.clone(), square.clone()) for master, mean, square in masters] for _ in range(2)
    )
    steps = {found: [torch.tensor(4.0) for _ in sizes] for found in ("ours", "theirs")}
    for number, skip in enumerate(skipped):
        gradients = [torch.randn(size).mul(10.0**-number).to(dtype) for size in sizes]
        for update, name, parameters in (
            (kernel._update_on_gpu, "ours", ours),
            (kernel.update_split, "theirs", theirs),
        ):
            given = [
                (*held[:2], gradient.clone(), *held[2:]) for held, gradient in zip(parameters, gradients, strict=True)
            ]
            update(given, steps[name], found_inf=torch.tensor(skip), **options)
        if not skip:
            masters = [
                adamw_in_torch(master, gradient, *moments, 5 + skipped[:number].count(0.0), **options)
                for (master, *moments), gradient in zip(masters, gradients, strict=True)
            ]
    for (weight, remainder, *moments), (other, left, *_), (master, *expected) in zip(
        ours, theirs, masters, strict=True
    ):
        assert same_bits(join(weight, remainder), master)
        assert all(map(torch.equal, moments, expected))
        torch.testing.assert_close(join(other, left), master, rtol=1e-6, atol=1e-7)
    assert steps["ours"] == steps["theirs"] == [torch.tensor(6.0)] * 3


def two_models(seed=0, sizes=((300, 40), (300,), (7, 3))):
    """Return two models with the same weights: one with whole masters and torch's optimizer, one with split masters."""
    torch.manual_seed(seed)
    whole = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in sizes)
    job = compose_job(
        "debug=tiny", "precision=bf16", "optimizer.masters=split", "data.local_batch=1", "data.global_batch=2"
    )
    split = nn.ModuleList(nn.ParameterList([copy.deepcopy(parameter)]) for parameter in whole)
    split_masters(split, job)
    return list(whole), list(split.parameters())


def two_optimizers(whole, split, **options):
    options = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True} | options
    optimizers = torch.optim.AdamW(whole, **options), SplitAdamW(split, **options)
    for optimizer in optimizers:
        optimizer.param_groups[0]["peak_lr"] = options["lr"]
    return optimizers


def fifty_steps(whole, split, optimizers, dtype, steps=50):
    """Give both models the same clipped gradients of all sizes, with rates that change, and one step that is not
    finite.
    """
    for number in range(steps):
        for one, other in zip(whole, split, strict=True):
            gradient = (torch.randn_like(one) * 10.0 ** torch.randint(-6, 3, one.shape)).to(dtype)
            one.grad, other.grad = gradient.float(), gradient.clone()
        for optimizer in optimizers:
            set_lr([optimizer], 1 / (number + 1))
            step([optimizer], torch.tensor(1.0 + number % 3), torch.tensor(number != 7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fifty_steps_have_the_bits_of_whole_masters(dtype, monkeypatch):
    monkeypatch.setattr(kernel, "CHUNK", 4096)  # the first parameter has three chunks
    whole, split = two_models()
    for parameter in split:
        parameter.grad_dtype = dtype
    optimizers = two_optimizers(whole, split)
    fifty_steps(whole, split, optimizers, dtype)
    for one, other in zip(whole, split, strict=True):
        assert same_bits(one.detach(), master_of(other))
        for name, value in optimizers[0].state[one].items():
            assert torch.equal(value, optimizers[1].state[other][name])


def test_a_million_random_updates_have_the_bits_of_whole_masters():
    """Weights, moments and gradients are arbitrary, including those that overflow."""
    numbers = [any_floats(seed)[-MILLION:] for seed in range(4)]
    weight, remainder = halves_of(numbers[0])
    whole, means, squares, gradients = (
        nn.Parameter(numbers[0].clone()),
        numbers[1].clone(),
        numbers[2].abs(),
        numbers[3],
    )
    options = {
        "lr": 0.01,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "grad_scale": torch.tensor(2.0),
        "found_inf": torch.tensor(0.0),
    }
    ours = [weight, remainder, gradients.clone(), means.clone(), squares.clone()]
    steps = torch.tensor(3.0), torch.tensor(3.0)
    kernel.update_split([tuple(ours)], steps[:1], **options)
    adamw(
        [whole.data],
        [gradients],
        [means],
        [squares],
        [],
        [steps[1]],
        fused=True,
        amsgrad=False,
        maximize=False,
        **options,
    )
    good = ~whole.detach().isnan()
    assert good.float().mean() > 0.5
    assert same_bits(join(*ours[:2])[good], whole.detach()[good])
    assert steps[0] == steps[1] == 4


def test_a_state_goes_from_whole_to_split_masters_and_back():
    whole, split = two_models()
    optimizers = two_optimizers(whole, split)
    fifty_steps(whole, split, optimizers, torch.float32, steps=3)
    others = two_optimizers(whole, split)
    for optimizer, source in zip(others, reversed(optimizers), strict=True):
        optimizer.load_state_dict(copy.deepcopy(source.state_dict()))
    fifty_steps(whole, split, others, torch.float32, steps=3)
    for one, other in zip(whole, split, strict=True):
        assert same_bits(one.detach(), master_of(other))
        assert others[1].state[other]["exp_avg"].dtype == torch.float32


@pytest.fixture
def one_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield torch.device("cpu")
    dist.destroy_process_group()


@pytest.mark.parametrize(("local", "gradient"), [(16, torch.bfloat16), (4, torch.float32)])
def test_a_run_has_the_bits_of_whole_masters_whose_copies_round_as_halves_do(local, gradient, one_rank, monkeypatch):
    """Losses, norms and weights of ten steps are compared. Gradients that are computed only once are in bfloat16."""

    def cast(masters):
        if masters.pairs:
            whole, copies = zip(*masters.pairs, strict=True)
            foreach_copy(list(map(local_part, copies)), [halves_of(local_part(master))[0] for master in whole])

    monkeypatch.setattr(Masters, "cast", torch.no_grad()(cast))
    found = {}
    for masters in ("whole", "split"):
        job = compose_job(
            *later_wins(
                *BASE,
                "precision=bf16",
                "parallelism=single",
                f"data.local_batch={local}",
                "steps=10",
                "optimizer.decay_matrices_only=true",
                f"optimizer.masters={masters}",
            )
        )
        trainer, rows = build(job, one_rank), []
        loader = data.build(job, 0, 1)
        for number in range(10):
            set_lr(trainer.optimizers, (number + 1) / 10)
            share = trainer.forward_backward(loader.next())
            dtypes = {parameter.grad.dtype for parameter in trainer.masters.weights.parameters() if parameter.ndim > 1}
            agreement = trainer.agree(share, trainer.measure())
            trainer.update(agreement)
            rows.append(agreement.read()[:2])
        loader.close()
        assert dtypes == {torch.float32 if masters == "whole" else gradient}
        found[masters] = (
            rows,
            {name: master_of(parameter) for name, parameter in trainer.masters.weights.named_parameters()},
        )
    assert found["whole"][0] == found["split"][0]
    assert found["whole"][1].keys() == found["split"][1].keys()
    assert all(same_bits(weight, found["split"][1][name]) for name, weight in found["whole"][1].items())


REFUSED = {
    "precision=fp32": "precision.compute_dtype=float32 leaves nothing to split",
    "precision=bf16_full": "precision.param_dtype=bfloat16 has no float32 masters",
    "optimizer=muon": "optimizer.name=muon updates whole masters alone",
    "optimizer=sgd": "optimizer.name=sgd updates whole masters alone",
    "parallelism.backend=simple_fsdp": "parallelism.backend=simple_fsdp rounds gradients to the dtype of the weights",
}


@pytest.mark.parametrize("override", REFUSED)
def test_what_cannot_be_split_is_refused(override):
    from titan_hydra.core.job.config.fault import Fault
    from titan_hydra.core.job.rules.optimizer import masters_can_be_split

    job = compose_job("debug=tiny", "precision=bf16", *([override] if "=" in override else []))
    job.optimizer.masters = "split"
    assert list(masters_can_be_split(job)) == [Fault("optimizer.masters", "split", REFUSED[override], legal=("whole",))]
