"""Test Triton kernels without a GPU: against their references in torch, and as compiled code."""

import os
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    "script", ["interpreted_kernels.py", pytest.param("compiled_kernels.py", marks=pytest.mark.slow)]
)
def test_the_kernels_of_a_gpu_compute_what_torch_does_and_compile_without_spilling(script, tmp_path):
    """The kernels run in Triton's interpreter, and are compiled by Triton's compiler and ptxas."""
    if find_spec("triton") is None:
        pytest.skip("no triton here: pip install --target DIR triton, and PYTHONPATH=DIR")
    if tuple(map(int, version("triton").split(".")[:2])) < (3, 7):
        pytest.skip("the interpreter of triton before 3.7 cannot count over a length that numpy 2 holds in an array")
    environment = os.environ | {
        "TRITON_INTERPRET": str(int(script.startswith("interpreted"))),
        "TRITON_CACHE_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script)], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
