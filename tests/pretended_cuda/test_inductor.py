"""The code that the compiler writes for an H100 is still fused as well as docs/lab/performance.md states. No card is
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

PAGE = Path(__file__).parents[2] / "docs/lab/performance.md"
TABLES = {  # by release of torch, the newest first
    match[1]: match
    for match in re.finditer(
        r"^\| torch ([\d.]+): family \| compiled \| (.*) \|\n.*\n((\|.*\n)+)", PAGE.read_text(), re.M
    )
}
CHEAP = ("llama3", "bf16"), ("llama3", "fused")


def limits(release: str) -> dict[tuple[str, str, str], tuple[int, int, float]]:
    """Return the page's limits for a release by model, part and precision: kernels of forward and backward, GB."""
    rows = [[cell.strip() for cell in row.strip("| ").split("|")] for row in TABLES[release][3].splitlines()]
    found = {
        (model, part, precision): re.fullmatch(r"(\d+) \+ (\d+), ([\d.]+) GB", cell)
        for model, part, *cells in rows
        for precision, cell in zip(TABLES[release][2].split(" | "), cells, strict=True)
    }
    return {key: (int(match[1]), int(match[2]), float(match[3])) for key, match in found.items() if match}


@pytest.mark.parametrize("release", TABLES)
def test_the_page_has_every_part(release):
    """The newest release has all models in every precision; others have those that were tried."""
    newest, known = release == next(iter(TABLES)), limits(release)
    precisions = PRECISIONS if newest else TABLES[release][2].split(" | ")
    models = MODELS if newest else {model for model, *_ in known}
    assert set(known) == {
        (model, part, precision) for model in models for part in MODELS[model][0] for precision in precisions
    }


@pytest.mark.skipif(
    torch.version.cuda is None or not find_spec("triton") or not shutil.which("cc"),
    reason="needs torch's CUDA build with triton, as .ci/on-torch makes it, and a C compiler",
)
@pytest.mark.parametrize(
    ("model", "precision"),
    [
        pytest.param(model, precision, marks=() if (model, precision) in CHEAP else pytest.mark.slow)
        for model in MODELS
        for precision in PRECISIONS
    ],
)
def test_no_block_is_compiled_into_more(model, precision):
    """A graph break or a second compilation raises. Each release of torch fuses differently, so the numbers are checked
    only with those that the page names.
    """
    known = limits(torch.__version__.split("+")[0]) if torch.__version__.split("+")[0] in TABLES else {}
    for part, forward, backward in graphs_of(model, precision):
        kernels, limit = forward.kernels + backward.kernels, known.get((model, part, precision))
        assert not any(kernel.spilled for kernel in kernels), (part, kernels)
        found = len(forward.kernels), len(backward.kernels), round((forward.bytes + backward.bytes) / 1e9, 2)
        assert not limit or all(number <= most for number, most in zip(found, limit, strict=True)), (part, found, limit)
