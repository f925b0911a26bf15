"""Float8 casts in Triton, together with the norm or SwiGLU before them. A first pass over a matrix casts its rows and
finds the maxima of its columns; a second pass casts its columns. Imported only if there is a GPU.

A maximum is stored as an integer, the bit pattern of a magnitude. So the order of atomic operations does not matter, and
NaN and infinity are the largest values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

E4M3 = torch.float8_e4m3fn
TILE = 64  # columns of a tile that is stored transposed
# number of elements of the widest row that fits into a program's registers; wider rows are read twice, in parts
WIDEST = 16384
# number of elements of the longest norm's weight that is kept in registers; a longer weight is read again for each row
KEPT = tl.constexpr(8192)
PART = 2048  # columns of one part of a row wider than WIDEST


@triton.jit
def _bits(y):
    return y.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scales(bits):
    # Returns the scale and its inverse. The scale is the largest power of two whose product with the maximum is at most
    # 448 = 1.75 * 2**8. Both are NaN if the maximum is not finite. A maximum below 1e-12, torchao's bound, counts as
    # 1e-12. The addition makes a mantissa above 1.75 carry into the exponent.
    exponent = (tl.maximum(bits, 0x2B8CBCCC) + 0x1FFFFF) >> 23
    finite = bits < 0x7F800000
    scale = tl.where(finite, (262 - exponent) << 23, 0x7FC00000)
    inverse = tl.where(finite, (exponent - 8) << 23, 0x7FC00000)
    return scale.to(tl.float32, bitcast=True), inverse.to(tl.float32, bitcast=True)


@triton.jit
def _loaded(source, row, column, here, WIDTH, GATED):
    # Returns a part of a row in float32. If GATED, the row is first replaced by SwiGLU's product of its two halves.
    start = source + row * (2 * WIDTH if GATED else WIDTH) + column
    y = tl.load(start, mask=here, other=0.0).to(tl.float32)
    if GATED:
        y = y * tl.sigmoid(y) * tl.load(start + WIDTH, mask=here, other=0.0).to(tl.float32)
    return y


@triton.jit
def _rows(
    source,
    norm,
    quantized,
    inverses,
    maxima,
    rstds,
    height,
    epsilon,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
):
    # Casts ROWS whole rows, each with a scale of its own, after RMSNorm (NORM) or SwiGLU (GATED). Collects the maxima
    # of the columns, for the cast by columns in the backward.
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    largest = tl.zeros([BLOCK], tl.int32)
    if NORM and BLOCK <= KEPT:
        weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    for i in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i
        here = column < tl.where(row < height, WIDTH, 0)
        y = _loaded(source, row, column, here, WIDTH, GATED)
        if NORM:
            rstd = 1.0 / tl.sqrt(tl.sum(y * y, 0) / WIDTH + epsilon)
            tl.store(rstds + row, rstd, mask=row < height)
            if BLOCK > KEPT:
                weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
            y = y * rstd * weight
        bits = _bits(y)
        scale, inverse = _scales(tl.max(bits, 0))
        tl.store(inverses + row, inverse, mask=row < height)
        tl.store(quantized + row * WIDTH + column, (y * scale).to(tl.float8e4nv), mask=here)
        largest = tl.maximum(largest, bits)
    tl.atomic_max(maxima + column, largest, mask=inside, sem="relaxed")


@triton.jit
def _maxima(
    source,
    row_maxima,
    maxima,
    height,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    # First pass over rows too wide for _rows: the maxima of ROWS rows and of COLUMNS columns.
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    largest = tl.zeros([COLUMNS], tl.int32)
    for i in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i
        here = column < tl.where(row < height, WIDTH, 0)
        bits = _bits(_loaded(source, row, column, here, WIDTH, GATED))
        tl.atomic_max(row_maxima + row, tl.max(bits, 0), mask=row < height, sem="relaxed")
        largest = tl.maximum(largest, bits)
    tl.atomic_max(maxima + column, largest, mask=column < WIDTH, sem="relaxed")


@triton.jit
def _parts(source, row_maxima, quantized, inverses, WIDTH: tl.constexpr, GATED: tl.constexpr, COLUMNS: tl.constexpr):
    # Second pass over rows too wide for _rows: casts a part of one row, with the scale of the row's maximum.
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < WIDTH
    scale, inverse = _scales(tl.load(row_maxima + row))
    tl.store(inverses + row, inverse)  # every program of this row stores the same value
    y = _loaded(source, row, column, here, WIDTH, GATED)
    tl.store(quantized + row * WIDTH + column, (y * scale).to(tl.float8e4nv), mask=here)


@triton.jit
def _columns(
    source,
    norm,
    rstds,
    maxima,
    quantized,
    inverses,
    height,
    width,
    stride,
    NORM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Casts a tile with the scales of its columns, and stores it transposed. With NORM, rows are normalized again.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = (row < height)[:, None] & (column < width)[None, :]
    y = tl.load(source + row[:, None] * width + column[None, :], mask=here, other=0.0).to(tl.float32)
    if NORM:
        y = y * tl.load(rstds + row, mask=row < height, other=0.0)[:, None]
        y = y * tl.load(norm + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
    scale, inverse = _scales(tl.load(maxima + column, mask=column < width, other=0))
    tl.store(inverses + column, inverse, mask=column < width)  # every program of these columns stores the same values
    _store_transposed(quantized, y * scale[None, :], row, column, stride, here)


@triton.jit
def _store_transposed(quantized, y, row, column, stride, here):
    offsets = column[:, None] * stride + row[None, :]
    tl.store(quantized + offsets, tl.trans(y.to(tl.float8e4nv)), mask=tl.trans(here))


@triton.jit
def _gated_tile(gates, gradient, row, column, height, WIDTH):
    # Returns the gradients of both halves of SwiGLU's input, SwiGLU's product in the forward, and the mask of the tile.
    here = (row < height)[:, None] & (column < WIDTH)[None, :]
    offsets = row[:, None] * 2 * WIDTH + column[None, :]
    u = tl.load(gates + offsets, mask=here, other=0.0).to(tl.float32)
    g = tl.load(gates + offsets + WIDTH, mask=here, other=0.0).to(tl.float32)
    d = tl.load(gradient + row[:, None] * WIDTH + column[None, :], mask=here, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(u)
    silu = u * sigmoid
    return d * g * (sigmoid + silu * (1.0 - sigmoid)), d * silu, silu * g, here


@triton.jit
def _gated_maxima(
    gates,
    gradient,
    row_maxima,
    maxima,
    height,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TIMES: tl.constexpr,
):
    # First pass of SwiGLU's backward: the maxima of the rows and of the columns of its input's gradient.
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    largest_u = tl.zeros([COLUMNS], tl.int32)
    largest_g = tl.zeros([COLUMNS], tl.int32)
    for i in range(TIMES):
        row = (tl.program_id(0).to(tl.int64) * TIMES + i) * ROWS + tl.arange(0, ROWS)
        du, dg, _, _ = _gated_tile(gates, gradient, row, column, height, WIDTH)
        u, g = _bits(du), _bits(dg)
        tl.atomic_max(row_maxima + row, tl.max(tl.maximum(u, g), 1), mask=row < height, sem="relaxed")
        largest_u = tl.maximum(largest_u, tl.max(u, 0))
        largest_g = tl.maximum(largest_g, tl.max(g, 0))
    tl.atomic_max(maxima + column, largest_u, mask=column < WIDTH, sem="relaxed")
    tl.atomic_max(maxima + WIDTH + column, largest_g, mask=column < WIDTH, sem="relaxed")


@triton.jit
def _gated_backward(
    gates,
    gradient,
    row_maxima,
    maxima,
    product_maxima,
    rows,
    row_inverses,
    columns,
    inverses,
    products,
    product_inverses,
    height,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    # Second pass of SwiGLU's backward: casts its input's gradient by rows and by columns, and its product by columns.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    known = column < WIDTH
    du, dg, product, here = _gated_tile(gates, gradient, row, column, height, WIDTH)
    scale, inverse = _scales(tl.load(row_maxima + row, mask=row < height, other=0))
    tl.store(row_inverses + row, inverse, mask=row < height)
    offsets = row[:, None] * 2 * WIDTH + column[None, :]
    tl.store(rows + offsets, (du * scale[:, None]).to(tl.float8e4nv), mask=here)
    tl.store(rows + offsets + WIDTH, (dg * scale[:, None]).to(tl.float8e4nv), mask=here)
    scale, inverse = _scales(tl.load(maxima + column, mask=known, other=0))
    tl.store(inverses + column, inverse, mask=known)
    _store_transposed(columns, du * scale[None, :], row, column, height, here)
    scale, inverse = _scales(tl.load(maxima + WIDTH + column, mask=known, other=0))
    tl.store(inverses + WIDTH + column, inverse, mask=known)
    _store_transposed(columns, dg * scale[None, :], row, column + WIDTH, height, here)
    scale, inverse = _scales(tl.load(product_maxima + column, mask=known, other=0))
    tl.store(product_inverses + column, inverse, mask=known)
    _store_transposed(products, product * scale[None, :], row, column, height, here)


# Each program takes ROWS rows of a norm's input, one at a time. It writes their gradients to `result`, and the sum over
# its rows of the gradient of the norm's weight to its row of `partials`. A weight of at most KEPT columns stays in registers.
@triton.jit
def _norm_backward(
    source,
    rstds,
    norm,
    gradient,
    result,
    partials,
    height,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    # RMSNorm's gradient for ROWS rows; the weight's gradient is summed over these rows, and over programs afterwards.
    column = tl.arange(0, BLOCK)
    inside = column < WIDTH
    if BLOCK <= KEPT:
        weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(ROWS):
        row = tl.program_id(0).to(tl.int64) * ROWS + i
        here = column < tl.where(row < height, WIDTH, 0)
        rstd = tl.load(rstds + row, mask=row < height, other=0.0)
        normed = tl.load(source + row * WIDTH + column, mask=here, other=0.0).to(tl.float32) * rstd
        d = tl.load(gradient + row * WIDTH + column, mask=here, other=0.0).to(tl.float32)
        total += d * normed
        if BLOCK > KEPT:
            weight = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
        d = d * weight
        d = rstd * (d - normed * (tl.sum(normed * d, 0) / WIDTH))
        tl.store(result + row * WIDTH + column, d.to(result.dtype.element_ty), mask=here)
    tl.store(partials + tl.program_id(0).to(tl.int64) * WIDTH + column, total, mask=inside)


def _warps(block: int, elements: int = 16) -> int:
    # Each thread gets so many elements of a row. On an H200, 16 were 10 to 20 % faster for casts, 32 for norm_backward.
    return min(max(block // (32 * elements), 4), 32)


def _rows_at_once(height: int) -> int:
    # A program gets fewer rows if the matrix has few rows, so that all multiprocessors have work.
    return min(32, max(4, triton.next_power_of_2(height // 512)))


def rows_on_gpu(
    parts: Sequence[Tensor], norm: Tensor | None, eps: float, gated: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what the operator `float8_rows` returns, computed with kernels of Triton."""
    parts = [part.contiguous() for part in parts]
    device, width = parts[0].device, parts[0].shape[1] // (2 if gated else 1)
    height = sum(map(len, parts))
    quantized = torch.empty(height, width, dtype=E4M3, device=device)
    inverses = torch.empty(height, dtype=torch.float32, device=device)
    maxima = torch.zeros(width, dtype=torch.int32, device=device)
    rstds = torch.empty(height if norm is not None else 0, dtype=torch.float32, device=device)
    start = 0
    for part in parts:
        results_of_part = quantized[start:], inverses[start:]
        if norm is None and width > WIDEST:
            _cast_in_parts(part, *results_of_part, maxima, width, gated)
        else:
            at_once, block = _rows_at_once(len(part)), triton.next_power_of_2(width)
            _rows[(triton.cdiv(len(part), at_once),)](
                part,
                part if norm is None else norm,
                *results_of_part,
                maxima,
                rstds,
                len(part),
                eps,
                WIDTH=width,
                BLOCK=block,
                NORM=norm is not None,
                GATED=gated,
                ROWS=at_once,
                num_warps=_warps(block),
            )
        start += len(part)
    return quantized, inverses, maxima, rstds


def _cast_in_parts(
    source: Tensor, quantized: Tensor, inverses: Tensor, maxima: Tensor, width: int, gated: bool
) -> None:
    """Cast rows that are too wide for the registers of a program. One pass finds their maxima, a second one casts."""
    count, at_once, across = len(source), _rows_at_once(len(source)), triton.cdiv(width, PART)
    row_maxima = torch.zeros(count, dtype=torch.int32, device=source.device)
    options: dict[str, Any] = {"WIDTH": width, "GATED": gated, "COLUMNS": PART, "num_warps": 4}
    _maxima[(triton.cdiv(count, at_once), across)](source, row_maxima, maxima, count, ROWS=at_once, **options)
    _parts[(count, across)](source, row_maxima, quantized, inverses, **options)


def columns_on_gpu(
    parts: Sequence[Tensor], maxima: Tensor, norm: Tensor | None, rstds: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return what the operator `float8_columns` returns, computed with kernels of Triton."""
    parts = [part.contiguous() for part in parts]
    width, height = parts[0].shape[1], sum(map(len, parts))
    quantized = torch.empty(width, height, dtype=E4M3, device=maxima.device)
    inverses = torch.empty(width, dtype=torch.float32, device=maxima.device)
    start = 0
    for part in parts:
        _columns[(triton.cdiv(len(part), 128), triton.cdiv(width, TILE))](
            part,
            part if norm is None else norm,
            inverses if rstds is None else rstds,
            maxima,
            quantized[:, start:],
            inverses,
            len(part),
            width,
            height,
            NORM=norm is not None,
            ROWS=128,
            COLUMNS=TILE,
            num_warps=8,
        )
        start += len(part)
    return quantized, inverses


def gated_backward_on_gpu(
    gates: Tensor, gradient: Tensor, maxima: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return what the operator `float8_gated_backward` returns, computed with kernels of Triton."""
    gates, gradient = gates.contiguous(), gradient.contiguous()
    height, width = gradient.shape
    device = gradient.device
    row_maxima, both = (torch.zeros(length, dtype=torch.int32, device=device) for length in (height, 2 * width))
    rows, columns, products = (
        torch.empty(*shape, dtype=E4M3, device=device)
        for shape in ((height, 2 * width), (2 * width, height), (width, height))
    )
    inverses = [torch.empty(length, dtype=torch.float32, device=device) for length in (height, 2 * width, width)]
    across = triton.cdiv(width, TILE)
    _gated_maxima[(triton.cdiv(height, 256), across)](
        gates, gradient, row_maxima, both, height, WIDTH=width, ROWS=64, COLUMNS=TILE, TIMES=4, num_warps=4
    )
    _gated_backward[(triton.cdiv(height, 64), across)](
        gates,
        gradient,
        row_maxima,
        both,
        maxima,
        rows,
        inverses[0],
        columns,
        inverses[1],
        products,
        inverses[2],
        height,
        WIDTH=width,
        ROWS=64,
        COLUMNS=TILE,
        num_warps=4,
    )
    return rows, inverses[0], columns, inverses[1], products, inverses[2]


def norm_backward_on_gpu(x: Tensor, norm: Tensor, rstds: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Return what the operator `norm_backward` returns, computed with kernels of Triton."""
    x, gradient = x.contiguous(), gradient.contiguous()
    height, width = x.shape
    block, at_once = triton.next_power_of_2(width), _rows_at_once(height)
    programs = triton.cdiv(height, at_once)
    result, partials = torch.empty_like(x), torch.empty(programs, width, dtype=torch.float32, device=x.device)
    _norm_backward[(programs,)](
        x,
        rstds,
        norm,
        gradient,
        result,
        partials,
        height,
        WIDTH=width,
        BLOCK=block,
        ROWS=at_once,
        num_warps=_warps(block, elements=32),
    )
    return result, partials.sum(0).to(norm.dtype)
