"""Checks of Triton kernels without a GPU, in a process of its own: Triton reads TRITON_INTERPRET as it is imported.

TRITON_INTERPRET=1 python tests/core/kernels/interpreted_kernels.py
"""

import torch
import triton.language as tl

from titan_hydra.core.kernels import cross_entropy, cross_entropy_triton
from titan_hydra.core.kernels import float8 as reference
from titan_hydra.core.kernels import float8_triton as kernels


def near(found, exact, tolerance=0.1):
    """Return whether two tensors are close; the default tolerance exists because the interpreter rounds some percent of
    Float8 wrongly.
    """
    return (found.float() - exact.float()).norm() <= tolerance * exact.float().norm()


def alike(found, exact):
    """Return whether shapes, types and strides equal those of the reference. The compiler takes them from the
    reference.
    """
    return all(
        (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())
        for one, other in zip(found, exact, strict=True)
    )


def float8():
    """Compare every Float8 kernel with torch at sizes that are not a multiple of a tile. Maxima and scales must be
    equal.
    """
    torch.manual_seed(0)
    x, norm, gates, d = torch.randn(80, 96), torch.rand(96), torch.randn(80, 2 * 112), torch.randn(80, 112)
    x[3], x[5, 7], x[9, 1] = 0, torch.inf, torch.nan
    weights = [torch.randn(height, 96).bfloat16() for height in (64, 32, 48)]
    sources = [
        (weights, None, 0.0, False),
        ([x], None, 0.0, False),
        ([x[10:]], norm, 1e-5, False),
        ([gates], None, 0.0, True),
    ]
    cast = [reference.rows_in_torch(*source) for source in sources]
    for source, exact in zip(sources, cast, strict=True):
        found = kernels.rows_on_gpu(*source)
        assert alike(found, exact)
        torch.testing.assert_close(found[1], exact[1], rtol=0, atol=0, equal_nan=True)
        # the interpreter casts NaN to a number, but the row's scale makes all products NaN
        finite = exact[1].isfinite()
        assert near(found[0][finite], exact[0][finite])
        # in units of the last bit; differences come from rounding before the cast
        assert (found[2] - exact[2]).abs().max() <= (8 if source[1] is not None or source[3] else 0)
        assert near(found[3], exact[3], 1e-6)
    for (parts, weight, _, _), (_, _, maxima, rstds) in zip((sources[0], sources[2]), (cast[0], cast[2]), strict=True):
        rstds = None if weight is None else rstds
        exact, found = (
            one(parts, maxima, weight, rstds) for one in (reference.columns_in_torch, kernels.columns_on_gpu)
        )
        assert alike(found, exact) and torch.equal(found[1], exact[1]) and near(found[0], exact[0])
    exact, found = (
        one(gates, d, cast[3][2]) for one in (reference.gated_backward_in_torch, kernels.gated_backward_on_gpu)
    )
    assert alike(found, exact)
    for number in (0, 2, 4):
        assert near(found[number], exact[number]) and torch.equal(found[number + 1], exact[number + 1])
    arguments = x[10:], norm, cast[2][3], torch.randn(70, 96)
    exact, found = (one(*arguments) for one in (reference.norm_backward_in_torch, kernels.norm_backward_on_gpu))
    assert alike(found, exact) and near(found[0], exact[0], 1e-5) and near(found[1], exact[1], 1e-5)


def logits():
    """Compare the kernels of cross-entropy with torch, for rows wider than a block, targets that do not count, and
    weights.
    """
    torch.manual_seed(0)
    cross_entropy_triton.BLOCK = 256
    for dtype, tolerance in (
        (torch.float32, 1e-6),
        (torch.bfloat16, 2**-7),
    ):  # the interpreter truncates instead of rounding
        logits, targets = (torch.randn(9, 1031) * 5).to(dtype), torch.randint(-1, 1031, (9, 1))
        targets[3] = -1
        exact = cross_entropy.softmax_sums(logits)
        for ours, theirs in zip(cross_entropy_triton.sums_on_gpu(logits), exact, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
        weights = torch.rand(9, 1) * (targets >= 0)
        found, expected = logits.clone(), logits.clone()
        for slopes, tensor in ((cross_entropy_triton.slopes_on_gpu, found), (cross_entropy.logits_to_slopes, expected)):
            slopes(tensor, targets, exact[0], weights / exact[1], weights)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=1e-7)
        assert (found[3] == 0).all() and not (found == logits).all(1).any()


if __name__ == "__main__":
    logits()
    float8()
    # with smaller limits these small matrices are computed like the rows and norms of large models
    kernels.WIDEST, kernels.PART, kernels.KEPT = 64, 64, tl.constexpr(64)
    float8()
