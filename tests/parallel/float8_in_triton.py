"""Checks of the Triton kernels of Float8 without a GPU, each in a process of its own: Triton reads TRITON_INTERPRET as it is imported.

    TRITON_INTERPRET=1 python tests/parallel/float8_in_triton.py interpret
    python tests/parallel/float8_in_triton.py compile
"""
import sys

import torch
import triton

from titan_hydra.kernels import float8 as reference
from titan_hydra.kernels import float8_triton as kernels

POINTERS = {
    **dict.fromkeys(("norm", "source", "gates", "gradient", "result"), "*bf16"),
    **dict.fromkeys(("quantized", "rows", "columns", "products"), "*fp8e4nv"),
    **dict.fromkeys(("maxima", "row_maxima", "product_maxima"), "*i32"),
    **dict.fromkeys(("height", "width", "stride"), "i32"),
    "epsilon": "fp32",
}


def near(found, exact, tolerance=0.1):
    """Whether the distance is small; by default as the interpreter rounds some percent of Float8 wrongly."""
    return (found.float() - exact.float()).norm() <= tolerance * exact.float().norm()


def alike(found, exact):
    """Whether shapes, types and strides are those of the reference, from which the compiler takes them."""
    return all((one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
               for one, other in zip(found, exact, strict=True))


def interpret():
    """Compare every kernel with torch at sizes that fill no tile. Maxima and scales are exact."""
    torch.manual_seed(0)
    x, norm, gates, d = torch.randn(80, 96), torch.rand(96), torch.randn(80, 2 * 112), torch.randn(80, 112)
    x[3], x[5, 7], x[9, 1] = 0, torch.inf, torch.nan
    weights = [torch.randn(height, 96).bfloat16() for height in (64, 32, 48)]
    sources = [(weights, None, 0.0, False), ([x], None, 0.0, False), ([x[10:]], norm, 1e-5, False), ([gates], None, 0.0, True)]
    cast = [reference.rows_in_torch(*source) for source in sources]
    for source, exact in zip(sources, cast, strict=True):
        found = kernels.rows_on_gpu(*source)
        assert alike(found, exact)
        torch.testing.assert_close(found[1], exact[1], rtol=0, atol=0, equal_nan=True)
        finite = exact[1].isfinite()  # the interpreter casts NaN to a number; by the factor of its row all products are NaN
        assert near(found[0][finite], exact[0][finite])
        assert (found[2] - exact[2]).abs().max() <= (8 if source[1] is not None or source[3] else 0)  # bits, of rounding before the cast
        assert near(found[3], exact[3], 1e-6)
    for (parts, weight, _, _), (_, _, maxima, rstds) in zip((sources[0], sources[2]), (cast[0], cast[2]), strict=True):
        rstds = None if weight is None else rstds
        exact, found = (one(parts, maxima, weight, rstds) for one in (reference.columns_in_torch, kernels.columns_on_gpu))
        assert alike(found, exact) and torch.equal(found[1], exact[1]) and near(found[0], exact[0])
    exact, found = (one(gates, d, cast[3][2]) for one in (reference.gated_backward_in_torch, kernels.gated_backward_on_gpu))
    assert alike(found, exact)
    for number in (0, 2, 4):
        assert near(found[number], exact[number]) and torch.equal(found[number + 1], exact[number + 1])
    arguments = x[10:], norm, cast[2][3], torch.randn(70, 96)
    exact, found = (one(*arguments) for one in (reference.norm_backward_in_torch, kernels.norm_backward_on_gpu))
    assert alike(found, exact) and near(found[0], exact[0], 1e-5) and near(found[1], exact[1], 1e-5)


def compile_for_h100():
    """Compile every kernel at the widths of Llama 3.1 8B by Triton's compiler and ptxas, which need no device."""
    for width, norm, gated in ((4096, True, False), (14336, False, True), (4096, False, False)):
        block = triton.next_power_of_2(width)
        made(kernels._rows, kernels._warps(block), WIDTH=width, BLOCK=block, NORM=norm, GATED=gated, ROWS=32)
    for norm in (True, False):
        made(kernels._columns, 8, NORM=norm, ROWS=128, COLUMNS=64)
    made(kernels._gated_maxima, 4, casts=False, WIDTH=14336, ROWS=64, COLUMNS=64, TIMES=4)
    made(kernels._gated_backward, 8, WIDTH=14336, ROWS=64, COLUMNS=64)
    made(kernels._norm_backward, 4, casts=False, WIDTH=4096, BLOCK=4096, ROWS=32)


def made(kernel, warps, casts=True, **constants):
    """Compile a kernel; its PTX has Float8 casts that saturate or, without `casts`, none."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "*fp32") for name in kernel.arg_names}
    source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): value for name, value in constants.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert compiled.asm["cubin"]
    assert ("cvt.rn.satfinite.e4m3x2.f32" in compiled.asm["ptx"]) == casts
    print(kernel.__name__, constants, "shared", compiled.metadata.shared)


if __name__ == "__main__":
    {"interpret": interpret, "compile": compile_for_h100}[sys.argv[1]]()
