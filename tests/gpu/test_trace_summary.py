"""Test benchmarks/gpu/trace_summary.py: the shares add up."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

spec = spec_from_file_location("trace_summary", Path(__file__).parents[2] / "benchmarks/gpu/trace_summary.py")
trace = sys.modules[spec.name] = module_from_spec(spec)
spec.loader.exec_module(trace)


def event(name, begin, end, cat="kernel", tid=7):
    return {"ph": "X", "name": name, "ts": begin, "dur": end - begin, "cat": cat, "tid": tid}


STEP = event("ProfilerStep#3", 0, 100, "user_annotation", tid=1)


def test_kernels_share_the_time_and_communication_may_hide():
    summary = trace.summarize(
        [
            STEP,
            event("ampere_bf16_gemm_128", 0, 40),
            event("flash_fwd_kernel", 40, 50),
            event("ncclDevKernel_AllGather", 30, 70, tid=8),
            event("multi_tensor_apply_kernel", 80, 85),
            event("aten::mm", 0, 100, "cpu_op", tid=1),
        ]
    )
    assert summary.shares == pytest.approx(
        {
            "matmul": 0.4,
            "attention": 0.1,
            "communication": 0.2,
            "optimizer": 0.05,
            "loss": 0,
            "casts": 0,
            "other": 0,
            "idle": 0.25,
        }
    )
    assert summary.communication == pytest.approx(0.4)
    words = trace.text(summary)
    assert "communication   20.0%   and 20.0% more behind computation" in words
    assert words.index("gemm") < words.index("flash")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("triton_poi_fused__scaled_dot_product_cudnn_attention_mul_silu_3", "other"),
        ("triton_red_fused__to_copy_abs_amax_mean_1", "casts"),
        ("triton_red_fused__log_softmax_nll_loss_forward_0", "loss"),
        ("_slopes", "loss"),
        ("_adamw", "optimizer"),
        ("_maxima", "casts"),
        ("_norm_backward", "other"),
        ("Memcpy DtoD (Device -> Device)", "casts"),
        (
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
            "optimizer",
        ),
        ("aten::_fused_adamw_", "optimizer"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16", "attention"),
        ("nvjet_hsh_256x128_64x4_2x1_v_bz_coopA_NTN", "matmul"),
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("void at::native::vectorized_elementwise_kernel<8, at::native::bfloat16_copy_kernel_cuda>", "casts"),
    ],
)
def test_kernels_are_told_apart_by_name(name, kind):
    assert trace.kind_of(name) == kind


def test_operators_count_where_they_work_themselves():
    """A wait inside a node of the autograd engine counts as communication, and the optimizer's arithmetic as the
    optimizer.
    """
    summary = trace.summarize(
        [
            STEP,
            event("autograd::engine::evaluate_function: Gather", 0, 30, "cpu_op", 1),
            event("_c10d_functional::wait_tensor", 10, 30, "cpu_op", 1),
            event("aten::linear", 30, 60, "cpu_op", 1),
            event("aten::addmm", 35, 60, "cpu_op", 1),
            event("Optimizer.step#AdamW.step", 60, 80, "user_annotation", 1),
            event("aten::mm", 62, 70, "cpu_op", 1),
            event("gloo:all_reduce", 75, 90, "cpu_op", 2),
            event("aten::mm", 0, 100, "cpu_op", 3),
        ]
    )
    assert summary.shares == pytest.approx(
        {
            "matmul": 0.25,
            "attention": 0,
            "communication": 0.3,
            "optimizer": 0.2,
            "loss": 0,
            "casts": 0,
            "other": 0.15,
            "idle": 0.1,
        }
    )
    assert [name for name, _, _ in summary.top][:2] == ["aten::addmm", "_c10d_functional::wait_tensor"]


def test_a_trace_without_steps_is_refused():
    with pytest.raises(ValueError, match="no ProfilerStep"):
        trace.summarize([event("aten::mm", 0, 1, "cpu_op")])
