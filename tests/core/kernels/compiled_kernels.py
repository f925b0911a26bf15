"""Compile every kernel of ours for sm_90 and sm_100 at the widths of Llama 3.1's sizes, with Triton's compiler and
ptxas. This needs no device.

    python tests/core/kernels/compiled_kernels.py        # prints the table of docs/lab/performance.md; fails if a register is spilled
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from titan_hydra.core.kernels import cross_entropy_triton as cross_entropy
from titan_hydra.core.kernels import float8_triton as float8
from titan_hydra.core.kernels import split_triton as split

SIZES = {"8B": (4096, 14336), "70B": (8192, 28672), "405B": (16384, 53248)}  # widths of a model and of its feed-forward
VOCABULARY = 128256
ARCHITECTURES = (90, 100)
POINTERS = {
    **dict.fromkeys(("norm", "source", "gates", "gradient", "result", "gradients", "logits"), "*bf16"),
    **dict.fromkeys(("quantized", "rows", "columns", "products"), "*fp8e4nv"),
    **dict.fromkeys(("maxima", "row_maxima", "product_maxima"), "*i32"),
    **dict.fromkeys(("uppers", "lowers"), "*i16"),
    "targets": "*i64",
    **dict.fromkeys(("height", "width", "stride", "elements"), "i32"),
    **dict.fromkeys(("epsilon", "eps", "decay", "momentum", "beta2", "left2"), "fp32"),
}
SATURATING = "cvt.rn.satfinite.e4m3x2.f32"  # the PTX instruction of a cast to Float8

Case = tuple[str, int, Any, int, dict[str, Any]]  # purpose, width, kernel, number of warps, constants


def cases(dim: int, width: int) -> Iterator[Case]:
    """Yield every kernel with the arguments that a model of these widths uses."""
    for name, of, norm, gated in (
        ("rows after norm", dim, True, False),
        ("rows", dim, False, False),
        ("rows", width, False, False),
        ("rows of SwiGLU", width, False, True),
    ):
        block, shape = triton.next_power_of_2(of), {"WIDTH": of, "GATED": gated}
        if norm or of <= float8.WIDEST:
            yield name, of, float8._rows, float8._warps(block), shape | {"BLOCK": block, "NORM": norm, "ROWS": 32}
        else:
            yield f"{name}: maxima", of, float8._maxima, 4, shape | {"COLUMNS": float8.PART, "ROWS": 32}
            yield f"{name}: casts", of, float8._parts, 4, shape | {"COLUMNS": float8.PART}
    for norm in (True, False):
        yield (
            "columns" + " after norm" * norm,
            dim,
            float8._columns,
            8,
            {"NORM": norm, "ROWS": 128, "COLUMNS": float8.TILE},
        )
    tile = {"WIDTH": width, "ROWS": 64, "COLUMNS": float8.TILE}
    yield "SwiGLU's backward: maxima", width, float8._gated_maxima, 4, tile | {"TIMES": 4}
    yield "SwiGLU's backward: casts", width, float8._gated_backward, 4, tile
    block = triton.next_power_of_2(dim)
    yield (
        "norm's backward",
        dim,
        float8._norm_backward,
        float8._warps(block, elements=32),
        {"WIDTH": dim, "BLOCK": block, "ROWS": 32},
    )
    for name, kernel in (("softmax: sums", cross_entropy._sums), ("softmax: slopes", cross_entropy._slopes)):
        yield name, VOCABULARY, kernel, 8, {"BLOCK": cross_entropy.BLOCK}
    yield "split AdamW", dim, split._adamw, 4, {"BLOCK": split.BLOCK}


def usage(kernel: Any, warps: int, constants: dict[str, Any], architecture: int) -> tuple[int, int]:
    """Return the number of registers of a thread and the bytes that it spills."""
    fixed = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    signature = {name: "constexpr" if name in constants else POINTERS.get(name, "*fp32") for name in kernel.arg_names}
    aligned = {
        (place,): [["tt.divisibility", 16]] for place, kind in enumerate(signature.values()) if kind.startswith("*")
    }
    fused = kernel is not split._adamw
    made = triton.compile(
        ASTSource(kernel, signature, fixed, aligned),
        target=GPUTarget("cuda", architecture, 32),
        options={"num_warps": warps, "enable_fp_fusion": fused},
    )
    casts = any(signature[name] == "*fp8e4nv" for name in kernel.arg_names)
    if (SATURATING in made.asm["ptx"]) != casts:
        raise AssertionError(
            f"{kernel.__name__}: Float8 casts that saturate are expected where Float8 is written, and nowhere else"
        )
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    ptxas = tools / ("ptxas-blackwell" if architecture >= 100 and (tools / "ptxas-blackwell").exists() else "ptxas")
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(made.asm["ptx"])
        file.flush()
        line = [
            ptxas,
            "-v",
            f"--gpu-name=sm_{architecture}a",
            *["--fmad=false"] * (not fused),
            file.name,
            "-o",
            "/dev/null",
        ]
        told = subprocess.run(line, capture_output=True, text=True, check=True).stderr
    registers, stored, loaded = (
        int(re.search(words, told)[1])
        for words in (r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes spill loads")
    )
    return registers, stored + loaded


def main() -> int:
    """Print the table. Return 1 if any kernel spills."""
    spilled = 0
    print("| kernel | width | warps | " + " | ".join(f"sm_{one}: registers | spilled" for one in ARCHITECTURES) + " |")
    print("|---" * (3 + 2 * len(ARCHITECTURES)) + "|")
    seen = set()
    for dim, width in SIZES.values():
        for name, of, kernel, warps, constants in cases(dim, width):
            key = (kernel, *sorted(constants.items()))
            if key in seen:
                continue
            seen.add(key)
            found = [usage(kernel, warps, constants, one) for one in ARCHITECTURES]
            spilled += sum(spills for _, spills in found)
            print(
                f"| {name} | {of:,} | {warps} | " + " | ".join(f"{used} | {spills}" for used, spills in found) + " |",
                flush=True,
            )
    return int(spilled > 0)


if __name__ == "__main__":
    raise SystemExit(main())
