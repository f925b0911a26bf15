"""The code that the compiler writes for an H100 is still fused as well as docs/performance.md states. No card is
needed, but torch's CUDA build is.
"""

import re
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))

from compiled_blocks import MODELS, PRECISIONS, graphs_of

PAGE = Path(__file__).parents[2] / "docs/performance.md"
HEAD = re.search(r"^\| torch ([\d.]+): family \| compiled \| (.*) \|\n.*\n((\|.*\n)+)", PAGE.read_text(), re.M)


def limits() -> dict[tuple[str, str, str], tuple[int, int, float, int] | None]:
    """Return the page's limits by model, part and precision: kernels of forward and backward, GB, bytes spilled; None
    for "-".
    """
    rows = [[cell.strip() for cell in row.strip("| ").split("|")] for row in HEAD[3].splitlines()]
    numbers = re.compile(r"(\d+) \+ (\d+), ([\d.]+) GB(?:, spills (\d+) B)?")
    found = {
        (model, part, precision): numbers.fullmatch(cell)
        for model, part, *cells in rows
        for precision, cell in zip(HEAD[2].split(" | "), cells, strict=True)
    }
    return {
        key: match and (int(match[1]), int(match[2]), float(match[3]), int(match[4] or 0))
        for key, match in found.items()
    }


def test_the_page_has_every_part_in_every_precision():
    known = limits()
    assert set(known) == {
        (model, part, precision) for model, (parts, _) in MODELS.items() for part in parts for precision in PRECISIONS
    }
    assert all(known[model, part, "bf16"] for model, (parts, _) in MODELS.items() for part in parts)


@pytest.mark.slow
@pytest.mark.skipif(
    torch.version.cuda is None or not find_spec("triton") or not shutil.which("cc"),
    reason="needs torch's CUDA build with triton, as .ci/on-torch makes it, and a C compiler",
)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_no_block_is_compiled_into_more(model, precision):
    """A graph break or a second compilation raises. Other versions of torch fuse differently, so the numbers are
    checked only with the version that the page names.
    """
    for part, forward, backward in graphs_of(model, precision):
        known = limits()[model, part, precision]
        kernels, spilled = forward.kernels + backward.kernels, known[3] if known else 0
        assert all(kernel.spilled <= spilled for kernel in kernels), (part, kernels)
        if known and torch.__version__.startswith(HEAD[1]):
            found = len(forward.kernels), len(backward.kernels), round((forward.bytes + backward.bytes) / 1e9, 2)
            assert all(number <= limit for number, limit in zip(found, known, strict=False)), (part, found, known)
