"""A run whose sequences are split over ranks learns in mixed precision too."""

import pytest

from titan_hydra.experiments.compose.compose import compose_job


@pytest.mark.slow
@pytest.mark.parametrize("rotate", ["allgather", "ulysses"])
def test_it_learns_in_bfloat16(run_job, rotate):
    directory = run_job(
        compose_job(
            "debug=tiny", "checkpoint=off", "precision=bf16", "parallelism=cp", f"parallelism.cp_rotate={rotate}"
        )
    )
    assert run_job.losses(directory)[5] < run_job.losses(directory)[1]
