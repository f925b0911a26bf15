"""Layouts of all families step on a pretended H100 (README.md): no wrong device, no wait of the host, no race, one graph for cuDNN, the same
collectives on all ranks of a group, and the kernels and casts of kernels.txt.
"""
import difflib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pretended_cuda.device import build_guard
from tests.pretended_cuda.judge import faults, table
from tests.pretended_cuda.layouts import LAYOUTS, of_matrix
from tests.pretended_cuda.planted import NOTHING, PLANTED

HERE = Path(__file__).parent
TABLE = HERE / "kernels.txt"


@pytest.fixture(scope="session")
def stepped(request, tmp_path_factory):
    """A function that returns the records of layouts of a kind, stepped in one process. Skips where there is no C++ compiler."""
    guard = build_guard(request.config.cache.mkdir("pretended_cuda"))
    if guard is None:
        pytest.skip("the pretended CUDA device needs a C++ compiler (g++)")
    known = {}

    def step(kind):
        if kind not in known:
            wanted = [item.callspec.params for item in request.session.items if "stepped" in item.fixturenames and hasattr(item, "callspec")]
            names = [parameters[kind] for parameters in wanted if kind in parameters]
            out = tmp_path_factory.mktemp("pretended") / "records.json"
            done = subprocess.run([sys.executable, "-m", "tests.pretended_cuda.step", guard, out, kind, *names], capture_output=True,
                                  text=True, cwd=HERE.parents[1], check=False, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            known[kind] = json.loads(out.read_text())
        return known[kind]

    return step


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_a_layout_steps_without_fault(layouts, stepped):
    result, layout = stepped("layouts")[layouts], LAYOUTS[layouts]
    assert result["error"] is None, result["error"]
    assert faults(result["ranks"], layout.waits, layout.gathers) == []


def test_kernels_and_casts_are_those_of_the_table(stepped, tmp_path):
    """Which attention kernel, product and casts each layer takes. If a change is right: copy the file that is named here."""
    found = table({name: result for name, result in stepped("layouts").items() if name in LAYOUTS})
    (tmp_path / TABLE.name).write_text(found)
    known = TABLE.read_text()
    changes = "\n".join(difflib.unified_diff(known.splitlines(), found.splitlines(), "known", "found", lineterm="", n=1))
    assert found == known, f"{changes}\ncp {tmp_path / TABLE.name} {TABLE}"


@pytest.mark.slow
@pytest.mark.parametrize("planted", [name for name in PLANTED if name != NOTHING])
def test_a_planted_fault_is_found(planted, stepped):
    results, plant = stepped("planted"), PLANTED[planted]
    result, clean = results[planted], results[NOTHING]
    assert clean["error"] is None and faults(clean["ranks"], {}) == []
    found = [result["error"] or "", *faults(result["ranks"], plant.layout.waits, plant.layout.gathers)]
    rows = {NOTHING: clean} | ({NOTHING: result} if plant.layout is PLANTED[NOTHING].layout else {})
    found += difflib.unified_diff(table({NOTHING: clean}).splitlines(), table(rows).splitlines(), lineterm="", n=0)
    assert any(plant.said in line for line in found), found


@pytest.mark.slow
@pytest.mark.parametrize("matrix", of_matrix())
def test_a_layout_of_the_matrix_steps_without_fault(matrix, stepped):
    if reason := next((reason for part, reason in CANNOT.items() if part in matrix), None):
        pytest.skip(reason)
    result = stepped("matrix")[matrix]
    assert result["error"] is None, result["error"]
    assert faults(result["ranks"], waits_of(result)) == []
