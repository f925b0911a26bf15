"""Define the checks of gpu_cases.py that compare kernels with torch, on one device. See gpu_checks.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from gpu_cases import EXPERTS
from gpu_checks import Here
from torch.utils._python_dispatch import TorchDispatchMode

from titan_hydra.core.job.config.attention import kernels as allowed
from titan_hydra.core.job.config.attention import takes_offsets
from titan_hydra.core.kernels import float8
from titan_hydra.core.kernels.attention import SDPA, call_on
from titan_hydra.core.kernels.documents import document_mask, document_offsets
from titan_hydra.core.kernels.float8_units import Float8Linears, Float8SwiGLU
from titan_hydra.core.models.moe import Experts
from titan_hydra.core.parallel.split_masters import master_of, split_parameter
from titan_hydra.core.train.optimizer import step as optimizer_step
from titan_hydra.core.train.split_adamw import SplitAdamW
from titan_hydra.experiments.compose.compose import compose_job


class Operators(TorchDispatchMode):
    """Record the attention operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        if any(name in str(function) for name in ("scaled_dot_product", "attend_documents")) and "backward" not in str(
            function
        ):
            self.seen.append(str(function).removeprefix("aten._scaled_dot_product_").removesuffix(".default"))
        return function(*arguments, **(kwargs or {}))


def kernels(here: Here) -> dict[str, Any]:
    """attention=auto finds a kernel for float32, grouped queries and documents, and torch uses the first kernel in the
    order of the rules.
    """
    place = torch.device("cuda" if here.gpu else "cpu")
    found = {}
    for name, dtype, kv_heads, packed in (
        ("bf16", torch.bfloat16, 2, False),
        ("bf16 documents", torch.bfloat16, 2, True),
        ("fp32", torch.float32, 4, False),
        ("fp32 grouped", torch.float32, 2, False),
        ("fp32 documents", torch.float32, 2, True),
    ):
        q, k, v = (
            torch.randn(2, heads, 256, 64, device=place, dtype=dtype, requires_grad=True)
            for heads in (4, kv_heads, kv_heads)
        )
        ends = torch.tensor([[1, 100, 100, 256], [44, 256, 256, 256]], dtype=torch.int32, device=place)
        mask = document_mask(ends, 256) if packed else None
        documents = document_offsets(ends) if packed and takes_offsets("auto", call_on(q, v, causal=True)) else mask
        with Operators() as operators:
            attended(SDPA("auto"), [q, k, v], documents, mask, name)
        found[name] = operators.seen[0] if operators.seen else "math"
        if documents is mask:
            first, *_ = allowed("auto", call_on(q, v, not packed, masked=packed))
            assert found[name].startswith(first), f"{name}: {found[name]}, and the rules say {first}"
    assert "attend_documents" in found["bf16 documents"], found
    return found


def attended(
    sdpa: SDPA,
    inputs: list[torch.Tensor],
    documents: torch.Tensor | None,
    mask: torch.Tensor | None,
    name: str,
    limit: float = 1e-2,
) -> float:
    """Return the largest relative distance of attention and its gradients from float64; raise if it is over the limit."""
    out = sdpa(*inputs, documents)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    right = F.scaled_dot_product_attention(*exact, mask, is_causal=mask is None and sdpa.causal, enable_gqa=True)
    slope = torch.randn_like(right)
    gradients, exact_ones = (
        torch.autograd.grad(out, inputs, slope.to(out.dtype)),
        torch.autograd.grad(right, exact, slope),
    )
    off = [
        ((one.double() - other).norm() / other.norm()).item()
        for one, other in [(out, right), *zip(gradients, exact_ones, strict=True)]
    ]
    assert all(distance < limit for distance in off), (
        f"{name}: attention and the gradients of q, k, v are {off} from float64"
    )
    return max(off)


def attention(here: Here) -> dict[str, Any]:
    """bf16 attention=auto is right at shapes where cuDNN was wrong: few key/value heads (pytorch#193893), a mask at 128
    * n + 64 tokens with scores far below 0 (#196678), and lengths that are not a multiple of a tile (#169849). It is
    also right where few kernels can be used: at widths 192 and 128, and without causality.
    """
    place = torch.device("cuda" if here.gpu else "cpu")
    torch.manual_seed(0)
    packed = document_mask(torch.tensor([[70, 192, 192], [1, 2, 192]], dtype=torch.int32, device=place), 192)
    found = {}
    for name, heads, kv_heads, widths, length, mask, causal, far in (
        ("4 kv heads", 16, 4, (128, 128), 512, None, True, 0),
        ("8 kv heads", 32, 8, (128, 128), 256, None, True, 0),
        ("192 and 128 wide", 4, 4, (192, 128), 256, None, True, 0),
        ("not causal", 4, 4, (64, 64), 264, None, False, 0),
        ("261 tokens", 4, 2, (64, 64), 261, None, True, 0),
        ("mask, 192 tokens", 4, 4, (64, 64), 192, packed, True, 0),
        ("mask, 192 tokens, scores of -128", 4, 4, (64, 64), 192, packed, True, 4),
    ):
        q, k, v = (
            torch.randn(2, number, length, width, device=place)
            for number, width in ((heads, widths[0]), (kv_heads, widths[0]), (kv_heads, widths[1]))
        )
        inputs = [x.bfloat16().requires_grad_() for x in (q - far, k + far, v)]
        with Operators() as operators:
            off = attended(SDPA("auto", causal), inputs, mask, mask, name, limit=0.03 if far else 1e-2)
        found[name] = f"{operators.seen[0] if operators.seen else 'math'} {off:.1e}"
    return found


def empty_experts(here: Here) -> dict[str, Any]:
    """Each expert computes what it would compute alone in float64, even if some or all experts have no token
    (pytorch#172439). The gradient of an expert without tokens does not keep what its memory held before.
    """
    place = torch.device("cuda" if here.gpu else "cpu")
    torch.manual_seed(0)
    config: Any = compose_job(*EXPERTS, "model.n_experts=4", "model.dim=128").model
    worst = 0.0
    for counts in ([3, 0, 5, 0], [0, 0, 0, 300], [1, 64, 0, 7], [0, 0, 0, 0]):
        experts = Experts(config).to(place, torch.bfloat16)
        for weight in experts.parameters():
            torch.nn.init.normal_(weight, std=0.05)
        rows = torch.randn(sum(counts), 128, device=place).bfloat16().requires_grad_()
        leaves = [rows, *experts.parameters()]
        poisoned = [torch.full_like(leaf, torch.nan) for leaf in leaves for _ in range(4)]
        del poisoned
        order = torch.arange(len(rows), device=place)
        y = experts(rows, order, order, torch.tensor(counts, device=place))
        slope = torch.randn_like(y)
        exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
        x, w1, w2, w3 = exact
        parts = zip(x.split(counts), w1, w2, w3, strict=True)
        right = torch.cat([(F.silu(part @ one.T) * (part @ three.T)) @ two.T for part, one, two, three in parts])
        gradients = torch.autograd.grad(y, leaves, slope)
        idle = [number for number, count in enumerate(counts) if not count]
        assert not any(gradient[idle].any() for gradient in gradients[1:]), (
            f"{counts} tokens: an idle expert has a gradient"
        )
        for found, wanted in [
            (y, right),
            *zip(gradients, torch.autograd.grad(right, exact, slope.double()), strict=True),
        ]:
            off = ((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-30)).item() if found.numel() else 0.0
            assert off < 2e-2, f"{counts} tokens: {off} from float64"
            worst = max(worst, off)
    return {"off": worst}


def split_masters(here: Here) -> dict[str, Any]:
    """For the same gradients, twenty steps with split masters give the same weights as torch's fused AdamW with whole
    masters: bitwise without a GPU, and on a GPU up to the roundings that torch's kernel omits because it contracts
    operations.
    """
    place = torch.device("cuda" if here.gpu else "cpu")
    torch.manual_seed(0)
    whole = [torch.nn.Parameter(torch.randn(size, device=place)) for size in ((1000, 300), (300,), (17, 3))]
    split = [split_parameter(parameter, torch.bfloat16) for parameter in whole]
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
    optimizers = [torch.optim.AdamW(whole, **options), SplitAdamW(split, **options)]
    for number in range(20):
        for one, other in zip(whole, split, strict=True):
            other.grad = torch.randn_like(one).bfloat16()
            one.grad = other.grad.float()
        optimizer_step(
            optimizers, torch.tensor(1.0 + number % 3, device=place), torch.tensor(number != 7, device=place)
        )
    worst = max(apart(master_of(other), one.detach()) for one, other in zip(whole, split, strict=True))
    if worst > (1e-6 if here.gpu else 0):
        raise AssertionError(f"weights differ by {worst}")
    return {"weights": sum(parameter.numel() for parameter in whole), "apart": worst}


def float8_casts(here: Here) -> dict[str, Any]:
    """The operators cast as torch does on the same device, at sizes that are not a multiple of a tile, and the matmuls
    multiply these casts.
    """
    place = torch.device("cuda" if here.gpu else "cpu")
    torch.manual_seed(0)
    x, d, norm = (torch.randn(*shape, device=place).bfloat16() for shape in ((272, 1040), (272, 1040), (1040,)))
    weights = [torch.randn(height, 1040, device=place).bfloat16() / 32 for height in (1040, 144, 144)]
    w1, w3, w2 = (
        torch.randn(*shape, device=place).bfloat16() / 32 for shape in ((2896, 1040), (2896, 1040), (1040, 2896))
    )
    gates, halves = torch.randn(272, 2 * 2896, device=place).bfloat16(), torch.randn(272, 2896, device=place).bfloat16()
    rows, product = float8.rows_in_torch([x], norm, 1e-5, False), float8.rows_in_torch([gates], None, 0.0, True)
    plain = float8.rows_in_torch(weights, None, 0.0, False)
    pairs = {
        "rows": (float8.float8_rows([x], norm, 1e-5, False), rows),
        "product": (float8.float8_rows([gates], None, 0.0, True), product),
        "weights": (float8.float8_rows(weights, None, 0.0, False), plain),
        "columns": (
            float8.float8_columns([x], rows[2], norm, rows[3]),
            float8.columns_in_torch([x], rows[2], norm, rows[3]),
        ),
        "weights' columns": (
            float8.float8_columns(weights, plain[2], None, None),
            float8.columns_in_torch(weights, plain[2], None, None),
        ),
        "SwiGLU": (
            float8.float8_gated_backward(gates, halves, product[2]),
            float8.gated_backward_in_torch(gates, halves, product[2]),
        ),
        "norm": (float8.norm_backward(x, norm, rows[3], d), float8.norm_backward_in_torch(x, norm, rows[3], d)),
    }
    worst = {
        name: max(apart(*pair) for pair in zip(found, exact, strict=True)) for name, (found, exact) in pairs.items()
    }
    for name, unit, more in (("linears", Float8Linears, weights), ("feed-forward", Float8SwiGLU, [w1, w3, w2])):
        results = []
        for emulate in (not here.gpu, True):
            leaves = [tensor.clone().requires_grad_() for tensor in (x, norm, *more)]
            y = unit.apply(*leaves[:2], 1e-5, emulate, *leaves[2:])
            torch.manual_seed(1)
            results.append([y.detach(), *torch.autograd.grad(y, leaves, torch.randn_like(y))])
        worst[name] = max(apart(*pair) for pair in zip(*results, strict=True))
    limits = {"weights": 0.0, "weights' columns": 0.0}
    if bad := {name: value for name, value in worst.items() if value > limits.get(name, 0.02)}:
        raise AssertionError(f"relative distances from torch: {bad}")
    return worst


def apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative distance of two tensors; their shapes, types and strides must agree."""
    if (found.shape, found.dtype, found.stride()) != (exact.shape, exact.dtype, exact.stride()):
        raise AssertionError(
            f"{found.shape} {found.dtype} {found.stride()} is not {exact.shape} {exact.dtype} {exact.stride()}"
        )
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))
