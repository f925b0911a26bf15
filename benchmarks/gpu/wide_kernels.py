"""Compare this package's kernels with torch at the widths of Llama 3.1 8B: python benchmarks/gpu/wide_kernels.py [cuda|cpu]

One JSON line for each kernel: its relative distances from torch, its milliseconds on the device, and the TB/s of the
bytes that it must read and write. A time that would have the host's time in it is null. The first line has what the
card reaches: TFLOP/s of a bf16 matmul, TB/s of a copy. The exit status is 1 if a kernel is wrong. tests/gpu compares the
same kernels at small sizes; on a CPU the sizes here are small too.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # a carried tree is not installed

from titan_hydra.core.kernels import float8
from titan_hydra.core.kernels.cross_entropy import logits_to_slopes, softmax_sums
from titan_hydra.core.kernels.split_masters import halves_of, join, update_split

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cuda"
CPU = DEVICE == "cpu"
TOKENS, DIM, WIDTH, VOCABULARY = (96, 64, 192, 640) if CPU else (16384, 4096, 14336, 128256)
PARAMETERS = VOCABULARY * DIM
ENDS = 16 if CPU else 128  # rows that are compared: the first and the last, where an index would overflow
LIMIT = 0.02  # a Float8 value may be rounded to its neighbour
REPEATS = 8
BUSY = 8192  # rows and columns of the matmuls behind which calls are queued


def main() -> int:
    torch.manual_seed(0)
    checks = (
        rows_after_norm,
        weights,
        columns_after_norm,
        swiglu,
        swiglu_backward,
        norm_backward,
        cross_entropy,
        adamw,
    )
    ceilings()
    wrong = [check.__name__ for check in checks if not right(check)]
    print(
        f"{len(checks) - len(wrong)} of {len(checks)} are right", *wrong, sep="; wrong: " if wrong else "", flush=True
    )
    return int(bool(wrong))


def right(check: Callable[[], bool]) -> bool:
    """Run one check. An error counts as wrong; if the device is lost, the process ends."""
    try:
        return check()
    except Exception as error:
        text = f"{type(error).__name__}: {str(error)[:300]}"
        print(json.dumps({"kernel": check.__name__, "error": text}), flush=True)
        if "CUDA error" in text:
            raise SystemExit("this process can use the device no more") from None
        return False
    finally:
        if not CPU:
            torch.cuda.empty_cache()


# --- measuring --------------------------------------------------------------------------------------------------------


def show(name: str, off: dict[str, float], call: Callable[[], object], size: float, limit: float = LIMIT) -> bool:
    """Print the line of a kernel whose call must read and write `size` bytes. Return whether it is right."""
    good = all(value <= limit for value in off.values())  # NaN is not
    ms = milliseconds(call)
    distances = {key: float(f"{value:.1e}") for key, value in off.items()}
    found = {"kernel": name, "right": good, "off": distances, "ms": rounded(ms, 3), "tb_s": rounded(per(size, ms), 2)}
    print(json.dumps(found), flush=True)
    return good


def milliseconds(call: Callable[[], object]) -> float | None:
    """Return the median time of a call on the device, after one call that compiles; None if it has the host's time in it.

    A call of a custom operator takes the host 0.15 ms, longer than the small kernels run. So all calls are queued behind
    matmuls that keep the device busy meanwhile. If the device was faster than the host nevertheless, the calls are
    queued again behind more of them.
    """
    call()
    if CPU:
        began = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - began)
    busy = random(BUSY, BUSY)
    for matmuls in (8, 32, 128):  # 11, 44 and 175 ms on an H200
        torch.cuda.synchronize()
        for _ in range(matmuls):
            busy @ busy
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        queued = not marks[0].query()  # the device has not begun the first call
        torch.cuda.synchronize()
        if queued:
            return sorted(one.elapsed_time(other) for one, other in itertools.pairwise(marks))[REPEATS // 2]
    return None


def per(size: float, ms: float | None) -> float | None:
    """Return the rate of `size` in these milliseconds, in 10^12 a second."""
    return None if ms is None else size / ms / 1e9


def rounded(number: float | None, digits: int) -> float | None:
    return None if number is None else round(number, digits)


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Return normal bf16 numbers."""
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16) * scale


def apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the relative distance of two tensors."""
    found, exact = found.double(), exact.double()
    return float((found - exact).norm() / exact.norm().clamp(min=1e-30))


def ends(tensor: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Return the first and last rows, or columns, of a tensor."""
    parts = (tensor.narrow(dim, first, ENDS) for first in (0, tensor.shape[dim] - ENDS))
    return torch.cat([part.float() if part.dtype == float8.E4M3 else part for part in parts], dim)


def values(cast: torch.Tensor, inverses: torch.Tensor) -> torch.Tensor:
    """Return what Float8 rows stand for, from the inverse scale of each row."""
    return cast.float() * inverses[:, None]


# --- the kernels ------------------------------------------------------------------------------------------------------


def ceilings() -> None:
    """Print what the card reaches in a bf16 matmul and in a copy."""
    size, count = (256, 2**20) if CPU else (8192, 2**31)
    a, b = random(size, size), random(size, size)
    source = torch.empty(count, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    matmul, copy = milliseconds(lambda: a @ b), milliseconds(lambda: target.copy_(source))
    found = {"tflops": rounded(per(2 * size**3, matmul), 0), "copy_tb_s": rounded(per(2 * count, copy), 2)}
    print(json.dumps({"ceilings": f"bf16 {size}^3, copy of {count} bytes"} | found), flush=True)


def rows_after_norm() -> bool:
    x, weight = random(TOKENS, DIM), random(DIM, scale=0.1) + 1

    def call() -> list[torch.Tensor]:
        return float8.float8_rows([x], weight, 1e-5, False)

    found, exact = call(), float8.rows_in_torch([ends(x)], weight, 1e-5, False)
    parts = x.split(TOKENS // 8)
    maxima = torch.stack([float8.rows_in_torch([part], weight, 1e-5, False)[2].view(torch.float32) for part in parts])
    off = {
        "rows": apart(ends(values(*found[:2])), values(*exact[:2])),
        "column maxima": apart(found[2].view(torch.float32), maxima.amax(0)),
    }
    return show("rows after norm", off, call, 3 * x.numel())


def weights() -> bool:
    both = [random(WIDTH, DIM, scale=0.02) for _ in range(2)]
    found, exact = float8.float8_rows(both, None, 0.0, False), float8.rows_in_torch(both, None, 0.0, False)
    back, plain = (cast(both, exact[2], None, None) for cast in (float8.float8_columns, float8.columns_in_torch))
    rows = {"rows": apart(values(*found[:2]), values(*exact[:2])), "maxima": float((found[2] != exact[2]).sum())}
    columns = {"columns": apart(values(*back), values(*plain))}
    size = 6 * both[0].numel()
    good = show("rows of weights", rows, lambda: float8.float8_rows(both, None, 0.0, False), size)
    return show("columns of weights", columns, lambda: float8.float8_columns(both, exact[2], None, None), size) and good


def columns_after_norm() -> bool:
    x, weight = random(TOKENS, DIM), random(DIM, scale=0.1) + 1
    _, _, maxima, rstds = float8.float8_rows([x], weight, 1e-5, False)

    def call() -> list[torch.Tensor]:
        return float8.float8_columns([x], maxima, weight, rstds)

    off = {"columns": apart(values(*call()), values(*float8.columns_in_torch([x], maxima, weight, rstds)))}
    return show("columns after norm", off, call, 3 * x.numel())


def swiglu() -> bool:
    gates = random(TOKENS, 2 * WIDTH)

    def call() -> list[torch.Tensor]:
        return float8.float8_rows([gates], None, 0.0, True)

    off = {"rows": apart(ends(values(*call()[:2])), values(*float8.rows_in_torch([ends(gates)], None, 0.0, True)[:2]))}
    return show("rows of SwiGLU", off, call, 2.5 * gates.numel())


def swiglu_backward() -> bool:
    gates, slopes = random(TOKENS, 2 * WIDTH), random(TOKENS, WIDTH, scale=1e-3)
    maxima = float8.float8_rows([gates], None, 0.0, True)[2]

    def call() -> list[torch.Tensor]:
        return float8.float8_gated_backward(gates, slopes, maxima)

    found, exact = call(), float8.gated_backward_in_torch(ends(gates), ends(slopes), maxima)
    off = {"rows": apart(ends(values(*found[:2])), values(*exact[:2]))}
    for name, number in (("columns", 2), ("products", 4)):
        # the scales of these columns differ, as the maxima of all rows are not those of the first and last
        mine = ends(found[number], 1) * found[number + 1][:, None]
        off[name] = apart(mine, values(*exact[number : number + 2]))
    return show("SwiGLU's backward", off, call, (2 * 6 + 5) * slopes.numel(), limit=0.06)


def norm_backward() -> bool:
    x, weight, slopes = random(TOKENS, DIM), random(DIM, scale=0.1) + 1, random(TOKENS, DIM)
    rstds = float8.float8_rows([x], weight, 1e-5, False)[3]

    def call() -> list[torch.Tensor]:
        return float8.norm_backward(x, weight, rstds, slopes)

    found, exact = call(), float8.norm_backward_in_torch(x, weight, rstds, slopes)
    off = {"input": apart(found[0], exact[0]), "weight": apart(found[1], exact[1])}
    return show("norm's backward", off, call, 6 * x.numel())


def cross_entropy() -> bool:
    logits = random(TOKENS, VOCABULARY, scale=2.0)
    targets = torch.randint(0, VOCABULARY, (TOKENS, 1), device=DEVICE)
    targets[::7] = -1  # positions that do not count
    kept, wanted = ends(logits).float(), ends(targets)
    largest, sums = softmax_sums(logits)
    off = {"logsumexp": apart(ends(sums.log() + largest).squeeze(1), kept.logsumexp(1))}
    good = show("softmax: sums", off, lambda: softmax_sums(logits), 2 * logits.numel())
    weights = (targets >= 0).float() / 3

    def call() -> None:
        logits_to_slopes(logits, targets, largest, weights / sums, weights)  # in place

    call()
    exact = kept.softmax(1).scatter_add_(1, wanted.clamp(min=0), -(wanted >= 0).float()) * (wanted >= 0) / 3
    return show("softmax: slopes", {"slopes": apart(ends(logits), exact)}, call, 4 * logits.numel()) and good


def adamw() -> bool:
    """The update of split masters, with a gradient that is scaled by a half."""
    master, gradient = torch.randn(PARAMETERS, device=DEVICE) / 50, random(PARAMETERS)
    weight, rest = halves_of(master)
    moments = [torch.zeros(PARAMETERS, device=DEVICE) for _ in range(2)]
    count, scale = torch.zeros((), device=DEVICE), torch.tensor(2.0, device=DEVICE)
    options = {"lr": 1e-3, "eps": 1e-8, "weight_decay": 0.1}

    def call() -> None:
        state = [(weight, rest, gradient, *moments)]
        update_split(state, [count], beta1=0.9, beta2=0.95, grad_scale=scale, found_inf=None, **options)

    call()
    last = slice(-min(PARAMETERS, 1_000_000), None)
    small = torch.nn.Parameter(master[last].clone())
    small.grad = gradient[last].float() / 2
    torch.optim.AdamW([small], betas=(0.9, 0.95), fused=not CPU, **options).step()
    off = {"weights": apart(join(weight[last], rest[last]), small.detach()), "steps": float((count != 1).sum())}
    return show("split AdamW", off, call, 26 * PARAMETERS, limit=1e-6)


if __name__ == "__main__":
    sys.exit(main())
