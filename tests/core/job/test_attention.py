"""Test which attention kernels may compute a call: the whole rule as a table, for machines that need not be present."""

import pytest
import torch
import torch.nn.functional as F

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.attention import (
    KERNELS,
    Call,
    Machine,
    call_of,
    kernel_fault,
    kernels,
    refusal,
    takes_offsets,
)
from titan_hydra.core.kernels.attention import SDPA, suited
from titan_hydra.experiments.compose.compose import compose_job

H100, B200 = Machine((9, 0), (13, 0), 91900), Machine((10, 0), (13, 0), 91900)
ON_H100 = Call("cuda", machine=H100)
ALL = list(KERNELS)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (ON_H100, ALL),
        (Call("cuda"), ALL),  # on a login node the machine is not known
        (Call("cpu"), ["flash", "math"]),
        (Call("cpu", masked=True, deterministic=True, dtype="float64"), ["flash", "math"]),
        (Call("cpu", ring=True), ["flash"]),
        (ON_H100._replace(dtype="float16"), ALL),
        (ON_H100._replace(dtype="float32"), ["efficient", "math"]),
        (ON_H100._replace(dtype="float64"), ["math"]),
        (ON_H100._replace(masked=True), ["efficient", "math"]),
        (ON_H100._replace(deterministic=True), ["flash", "efficient", "math"]),
        (ON_H100._replace(ring=True), ["flash"]),
        (ON_H100._replace(machine=Machine((9, 0), (12, 8), 91900)), ["flash", "efficient", "math"]),
        (ON_H100._replace(machine=Machine((9, 0), (12, 9), 91900)), ALL),
        (ON_H100._replace(machine=Machine((9, 4), (), 0)), ["flash", "efficient", "math"]),  # ROCm
        (ON_H100._replace(width=192), ALL),  # the width of DeepSeek-V3's queries and keys
        (ON_H100._replace(width=192, machine=B200), ALL),
        (ON_H100._replace(width=192, machine=Machine((8, 0), (13, 0), 91900)), ["flash", "efficient", "math"]),
        (ON_H100._replace(width=192, value_width=192), ["flash", "efficient", "math"]),
        (ON_H100._replace(width=96, value_width=64), ALL),
        (ON_H100._replace(width=100, value_width=100), ["flash", "efficient", "math"]),
        (ON_H100._replace(width=264, value_width=264), ["efficient", "math"]),
        (ON_H100._replace(causal=False, keys=4608), ALL),
        (ON_H100._replace(causal=False, keys=704), ["flash", "efficient", "math"]),
        (ON_H100._replace(keys=704), ALL),
        (ON_H100._replace(causal=False, keys=704, machine=Machine((9, 0), (13, 2), 92600)), ALL),
    ],
)
def test_kernels_that_may_compute_a_call(call, expected):
    assert kernels("auto", call) == expected
    for kernel in KERNELS:
        assert (refusal(kernel, call) is None) == (kernel in expected)
        if kernel in expected:
            assert kernels(kernel, call) == [kernel] and kernel_fault(kernel, call) is None
        else:
            with pytest.raises(
                ConfigError, match=rf"model\.attention={kernel}: .*; one of auto, {', '.join(expected)}$"
            ):
                kernels(kernel, call)


@pytest.mark.parametrize(
    ("asked", "call", "offsets"),
    [
        ("auto", ON_H100, True),
        ("flash", ON_H100, True),
        ("cudnn", ON_H100, False),
        ("math", Call("cpu"), False),
        ("auto", Call("cpu"), True),
        ("auto", ON_H100._replace(dtype="float32"), False),
        ("auto", ON_H100._replace(width=100), False),
        ("auto", Call("cpu", dtype="float32"), True),
        ("auto", ON_H100._replace(width=264), False),
    ],
)
def test_documents_need_no_mask_where_flash_computes_them(asked, call, offsets):
    assert takes_offsets(asked, call) == offsets


def test_a_job_says_what_its_attention_is():
    packed = "data.document_mask=true"
    job = compose_job("model=deepseek_v3_debug", "data=embedded", packed, "debug.deterministic=true")
    call = call_of(job)
    assert (call.width, call.value_width, call.masked, call.deterministic) == (
        job.model.head_width,
        job.model.v_head_dim,
        False,
        True,
    )
    assert call_of(compose_job("data=embedded", packed, "precision=fp32")).masked
    assert not call_of(compose_job("data=embedded", packed, "precision=fp32"), "cpu").masked
    assert call_of(compose_job("parallelism=cp", "gpus=2")).ring
    assert not call_of(compose_job("parallelism=cp", "gpus=2", "parallelism.cp_rotate=ulysses")).ring


def test_efficient_attention_of_grouped_queries_has_a_key_for_each():
    """Before torch 2.14 the efficient kernel, the fastest for float32 on a GPU, does not support grouped queries, and
    SDPA would choose the kernel that keeps all scores. So the efficient kernel gets a key for each query head; other
    kernels get grouped keys.
    """
    assert kernels("auto", ON_H100._replace(dtype="float32"))[0] == "efficient"
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (6, 2, 2))
    expected = SDPA("math")(q, k, v)
    keys, values, width = suited("efficient", q, k, v)
    assert keys.shape == values.shape == q.shape and width == 8
    found = F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=False)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(expected)
    wanted, given = (torch.autograd.grad((out * weights).sum(), (q, k, v)) for out in (expected, found))
    torch.testing.assert_close(given, wanted)
    for kernel in ("cudnn", "flash", "math"):
        assert suited(kernel, q, k, v)[:2] == (k, v)
