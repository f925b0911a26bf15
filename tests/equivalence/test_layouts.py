"""Every layout of the acceptance matrix learns what one process learns; `titan verify` runs the same matrix. This
folder has the tests of titan_hydra/instruments/verify.
"""

import pytest

from tests.equivalence.cover import cover
from titan_hydra.instruments.verify.case import QUICK_STEPS
from titan_hydra.instruments.verify.matrix import whole_matrix
from titan_hydra.instruments.verify.verify import verify

CASES = list(whole_matrix())
DEFAULT = cover([case for case in CASES if case.quick])


@pytest.fixture(scope="session")
def outcomes(request):
    """Run all chosen cases at once, with one set of processes for each number of ranks. `titan verify` makes more steps
    of each case.
    """
    chosen = [item.callspec.params["case"] for item in request.session.items if "outcomes" in item.fixturenames]
    return {outcome.case.name: outcome for outcome in verify(chosen, QUICK_STEPS)}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case,
            id=case.name,
            marks=pytest.mark.slow if case.slow else () if case.name in DEFAULT else pytest.mark.long,
        )
        for case in CASES
    ],
)
def test_layout_learns_what_one_process_learns(case, outcomes):
    outcome = outcomes[case.name]
    assert outcome.start == 0, "initial weights depend on the layout"
    assert outcome.drift == 0, "copies of weights came apart"
    assert outcome.loss <= case.loss
    assert outcome.norm <= case.norm
    assert outcome.gradients <= case.gradients, outcome.worst
    assert outcome.weights <= case.weights, outcome.worst
    assert outcome.rounded == 0, "gradients were summed in bfloat16"
    assert outcome.band <= 1, outcome
    assert outcome.passed, outcome
