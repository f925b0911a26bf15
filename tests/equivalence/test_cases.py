"""Every case of the matrix has a legal job: one that no rule refuses, at the number of ranks that it states."""

from titan_hydra.core.job.ranks import world_size
from titan_hydra.instruments.verify.matrix import whole_matrix
from titan_hydra.instruments.verify.verify import job_of


def test_no_case_is_refused():
    """One refused case ends the whole of `titan verify`, and most cases run in no other test."""
    for case in whole_matrix():
        assert world_size(job_of(case)) == case.ranks, case.name
