"""The checks of gpu_cases.py that compare kernels with torch, on one device. See gpu_checks.py."""
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from gpu_checks import Here
from torch.utils._python_dispatch import TorchDispatchMode

from titan_hydra.kernels import float8
from titan_hydra.kernels.documents import can_attend, document_mask, document_offsets
from titan_hydra.kernels.float8_units import Float8Linears, Float8SwiGLU
from titan_hydra.models.layers import SDPA
from titan_hydra.parallel.split_masters import master_of, split_parameter
from titan_hydra.train.optimizer import step as optimizer_step
from titan_hydra.train.split_adamw import SplitAdamW


class Operators(TorchDispatchMode):
    """Notes the attention operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function, types, arguments=(), kwargs=None):
        if any(name in str(function) for name in ("scaled_dot_product", "attend_documents")) and "backward" not in str(function):
            self.seen.append(str(function).removeprefix("aten._scaled_dot_product_").removesuffix(".default"))
        return function(*arguments, **(kwargs or {}))


def kernels(here: Here) -> dict[str, Any]:
    """attention=auto takes cuDNN for bf16 on a GPU, and finds a kernel for float32, grouped queries and documents."""
    place = torch.device("cuda" if here.gpu else "cpu")
    found = {}
    for name, dtype, kv_heads, packed in (("bf16", torch.bfloat16, 2, False), ("bf16 documents", torch.bfloat16, 2, True),
                                          ("fp32", torch.float32, 4, False), ("fp32 grouped", torch.float32, 2, False),
                                          ("fp32 documents", torch.float32, 2, True)):
        q, k, v = (torch.randn(2, heads, 256, 64, device=place, dtype=dtype, requires_grad=True) for heads in (4, kv_heads, kv_heads))
        ends = torch.tensor([[1, 100, 100, 256], [44, 256, 256, 256]], dtype=torch.int32, device=place)
        mask = document_mask(ends, 256) if packed else None
        documents = document_offsets(ends) if packed and can_attend(q, 64) else mask
        with Operators() as operators:
            out = SDPA("auto")(q, k, v, documents)
        out.sum().backward()
        exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
        right = F.scaled_dot_product_attention(*exact, mask, is_causal=not packed, enable_gqa=True)
        right.sum().backward()
        for one, other in [(out, right), *((x.grad, y.grad) for x, y in zip((q, k, v), exact, strict=True))]:
            assert ((one.double() - other).norm() / other.norm()).item() < 1e-2, name
        found[name] = operators.seen[0] if operators.seen else "math"
    assert not here.gpu or found["bf16"] == "cudnn_attention", found
    assert "attend_documents" in found["bf16 documents"], found
    return found


def split_masters(here: Here) -> dict[str, Any]:
    """Twenty steps of split masters are, for the same gradients, those of torch's fused AdamW of whole ones: bit for bit without a GPU,
    on one to the roundings that torch's kernel saves by contracting operations.
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
        optimizer_step(optimizers, torch.tensor(1.0 + number % 3, device=place), torch.tensor(number != 7, device=place))
    worst = max(apart(master_of(other), one.detach()) for one, other in zip(whole, split, strict=True))
    if worst > (1e-6 if here.gpu else 0):
        raise AssertionError(f"weights differ by {worst}")
    return {"weights": sum(parameter.numel() for parameter in whole), "apart": worst}


def float8_casts(here: Here) -> dict[str, Any]:
    """The operators cast as torch does on the same device, at sizes that fill no tile, and the matmuls multiply what was cast."""
    place = torch.device("cuda" if here.gpu else "cpu")
    torch.manual_seed(0)
    x, d, norm = (torch.randn(*shape, device=place).bfloat16() for shape in ((272, 1040), (272, 1040), (1040,)))
    weights = [torch.randn(height, 1040, device=place).bfloat16() / 32 for height in (1040, 144, 144)]
    w1, w3, w2 = (torch.randn(*shape, device=place).bfloat16() / 32 for shape in ((2896, 1040), (2896, 1040), (1040, 2896)))
    gates, halves = torch.randn(272, 2 * 2896, device=place).bfloat16(), torch.randn(272, 2896, device=place).bfloat16()
    rows, product = float8.rows_in_torch([x], norm, 1e-5, False), float8.rows_in_torch([gates], None, 0.0, True)
    plain = float8.rows_in_torch(weights, None, 0.0, False)
    pairs = {
        "rows": (float8.float8_rows([x], norm, 1e-5, False), rows), "product": (float8.float8_rows([gates], None, 0.0, True), product),
        "weights": (float8.float8_rows(weights, None, 0.0, False), plain),
        "columns": (float8.float8_columns([x], rows[2], norm, rows[3]), float8.columns_in_torch([x], rows[2], norm, rows[3])),
        "weights' columns": (float8.float8_columns(weights, plain[2], None, None), float8.columns_in_torch(weights, plain[2], None, None)),
        "SwiGLU": (float8.float8_gated_backward(gates, halves, product[2]), float8.gated_backward_in_torch(gates, halves, product[2])),
        "norm": (float8.norm_backward(x, norm, rows[3], d), float8.norm_backward_in_torch(x, norm, rows[3], d)),
    }
    worst = {name: max(apart(*pair) for pair in zip(found, exact, strict=True)) for name, (found, exact) in pairs.items()}
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
    """The relative distance of two tensors, whose shapes, types and strides must agree."""
    if (found.shape, found.dtype, found.stride()) != (exact.shape, exact.dtype, exact.stride()):
        raise AssertionError(f"{found.shape} {found.dtype} {found.stride()} is not {exact.shape} {exact.dtype} {exact.stride()}")
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30))
