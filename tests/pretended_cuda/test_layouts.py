"""Layouts of all families make a step on a pretended H100 (README.md): no wrong device, no wait of the host, no race,
one graph for cuDNN, the same collectives on all ranks of a group, and the kernels and casts of kernels.txt.
"""

import difflib
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.pretended_cuda.device import build_guard
from tests.pretended_cuda.judge import faults, table
from tests.pretended_cuda.layouts import LAYOUTS, of_matrix
from tests.pretended_cuda.planted import NOTHING, PLANTED
from titan_hydra.core.job.freeze import freeze
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan import memory
from titan_hydra.experiments.plan.shape import shape_of

# Parts of names in the matrix, with the reason why the pretended H100 cannot run these cases.
CANNOT = {"mxfp8": "its matmuls need a B200", "float8 fused": "a card runs its Triton kernels"}
FROM_MATRIX = of_matrix()
HERE = Path(__file__).parent
KERNELS = (HERE / "kernels.txt").read_text().strip()
RELEASE = ".".join(
    version("torch").split(".")[:2]
)  # layouts that differ in it have a section of their own in kernels.txt


@pytest.fixture(scope="session")
def stepped(request, tmp_path_factory):
    """Return a function that returns the records of layouts of one kind, stepped in one process. Skip if there is no
    C++ compiler.
    """
    kept = getattr(request.config, "cache", None)  # none in the trial of mutants
    guard = build_guard(kept.mkdir("pretended_cuda") if kept else tmp_path_factory.mktemp("guard"))
    if guard is None:
        pytest.skip("the pretended CUDA device needs a C++ compiler (g++)")
    known = {}

    def step(kind):
        if kind not in known:
            wanted = [item.callspec.params for item in request.session.items if "stepped" in item.fixturenames]
            names = [NOTHING] * (kind == "planted") + [parameters[kind] for parameters in wanted if kind in parameters]
            out = tmp_path_factory.mktemp("pretended") / "records.json"
            done = subprocess.run(
                [sys.executable, "-m", "tests.pretended_cuda.step", guard, out, kind, *names],
                capture_output=True,
                text=True,
                cwd=HERE.parents[1],
                check=False,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
            )
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
            known[kind] = json.loads(out.read_text())
        return known[kind]

    return step


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_a_layout_steps_without_fault(layouts, stepped):
    result, layout = stepped("layouts")[layouts], LAYOUTS[layouts]
    assert result["error"] is None, result["error"]
    assert faults(result["ranks"], layout.waits, layout.gathers) == []
    sections = dict(section.split("\n", 1) for section in KERNELS.split("\n\n"))
    known = sections.get(f"[{layouts}; torch {RELEASE}]", sections[f"[{layouts}]"])
    assert table(result["ranks"]) == known, "the part of kernels.txt that is to be pasted, if the change is right"


@pytest.mark.parametrize("layouts", [name for name in LAYOUTS if "offload" in name])
def test_a_layout_holds_on_the_host_and_on_the_device_what_a_plan_counts(layouts, stepped):
    job = freeze(compose_unchecked(*LAYOUTS[layouts].overrides))
    peak, held = memory.peak(job), {rank: one["held"] for rank, one in stepped("layouts")[layouts]["ranks"].items()}
    here = "core/train/offloaded.py" if job.optimizer.offload else "core/parallel/offload.py"
    norms = 3e-3 * job.optimizer.offload  # a plan splits all parameters over tp
    on_host = max(one[f"on the host of {here}"] for one in held.values())
    assert on_host == pytest.approx(memory.on_the_host(job), rel=norms, abs=0)
    on_device, terms = held[str(peak.rank)][f"on the device of {here}"], {term.name: term.bytes for term in peak.terms}
    if job.optimizer.offload:
        _, moving = [*memory._moments(shape := shape_of(job), peak.pipeline_rank, 0, memory.Constants())][-1]
        assert 1 - norms <= moving[-1].bytes / on_device < 1.15 and "optimizer" not in terms
        assert on_device < memory.state_bytes(shape, peak.pipeline_rank) or job.model.dim < 2048
    else:
        assert on_device == terms["inputs from the host"]


# one planted fault in each run: a judge that never finds anything would pass all other tests
OFTEN = "a number read"


@pytest.mark.parametrize(
    "planted",
    [pytest.param(name, marks=() if name == OFTEN else pytest.mark.slow) for name in PLANTED if name != NOTHING],
)
def test_a_planted_fault_is_found(planted, stepped):
    results, plant = stepped("planted"), PLANTED[planted]
    result, clean = results[planted], results[NOTHING]
    assert clean["error"] is None and faults(clean["ranks"], {}) == []
    found = [result["error"] or "", *faults(result["ranks"], plant.layout.waits, plant.layout.gathers)]
    if plant.layout is PLANTED[NOTHING].layout:
        found += difflib.unified_diff(
            table(clean["ranks"]).splitlines(), table(result["ranks"]).splitlines(), lineterm="", n=0
        )
    assert any(plant.said in line for line in found), found


@pytest.mark.slow
@pytest.mark.parametrize("matrix", [name for name in FROM_MATRIX if not any(part in name for part in CANNOT)])
def test_a_layout_of_the_matrix_steps_without_fault(matrix, stepped):
    result = stepped("matrix")[matrix]
    assert result["error"] is None, result["error"]
    assert faults(result["ranks"], FROM_MATRIX[matrix].waits) == []
