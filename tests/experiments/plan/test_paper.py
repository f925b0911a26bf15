"""Compare predictions with the paper's six tables, one H200, and rows that were not part of the fit."""

from pathlib import Path

import pytest

from tests.experiments.plan import paper
from titan_hydra.experiments.plan import memory

DOCS = Path(__file__).parents[3] / "docs" / "plan.md"
# error of the predicted throughput relative to the first row; the paper's ring attention is faster than its attention
# without a ring
WRONG = {("table5", "FSDP 4, CP 2"): -0.20}


@pytest.mark.parametrize(
    ("table", "row"), paper.rows(), ids=lambda value: value if isinstance(value, str) else value["name"]
)
def test_memory_of_a_row_is_within_ten_percent(table, row):
    measured, predicted, _, _ = paper.measured_and_predicted(row, table)
    assert predicted == pytest.approx(measured, rel=0.10)


@pytest.mark.parametrize("table", paper.TABLES)
def test_ratios_and_order_inside_a_table_are_right(table):
    found = [
        (row["name"], *paper.measured_and_predicted(row, table)[2:]) for name, row in paper.rows() if name == table
    ]
    _, measured, predicted = zip(*found, strict=True)
    for name, rate, guess in found:
        error = guess / predicted[0] / (rate / measured[0]) - 1
        expected = WRONG.get((table, name))
        assert error == pytest.approx(expected, abs=0.02) if expected else abs(error) < 0.15, (name, error)
    assert sorted(measured) == [rate for _, rate in sorted(zip(predicted, measured, strict=True))]


def test_small_shards_are_slow_in_float8():
    """The rows are 8B under TP 8, with matmuls of 512 to 1,792 columns per rank. With a rate that does not depend on
    the size, errors are 36 to 44 %.
    """
    for row in paper.held_out():
        if row["name"].startswith("8B"):
            _, _, measured, predicted = paper.measured_and_predicted(row)
            assert predicted == pytest.approx(measured, rel=0.20), row["name"]


@pytest.mark.parametrize("row", paper.H200, ids=lambda row: row["name"])
def test_memory_on_one_h200_is_within_eight_percent(row):
    measured, predicted, _, _ = paper.on_h200(row)
    assert predicted == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize("row", [row for row in paper.H200 if row.get("ours")], ids=lambda row: row["name"])
def test_speed_of_the_techniques_of_one_rank_is_within_twelve_percent(row):
    _, _, measured, predicted = paper.on_h200(row)
    assert predicted == pytest.approx(measured, rel=0.12)


def test_our_own_jobs_hold_less_than_the_papers():
    """Our jobs keep no outputs and compile the loss. The memory that older versions of torch needed is a parameter of
    these tests only.
    """
    for table, row in paper.rows():
        job = paper.job_of(row)
        assert memory.peak(job).gib < memory.peak(job, paper.of_then(row, table)).gib


def test_the_page_has_these_tables():
    page = DOCS.read_text()
    assert all(table in page for table in paper.markdown().split("\n\n")), "run python -m tests.experiments.plan.paper"
