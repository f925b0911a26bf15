"""Test that a search offloads to the host's memory where nothing else fits, and only there."""

import json

import pytest

from titan_hydra import cli
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.rules.checks import check
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.plan import memory, predict, search

COMMON = ("data=synthetic", "data.seq_len=8192", "data.global_batch=128", "compile=block")
ONE_H200, EIGHT_H100 = ("model=llama3_8b", "hardware=h200"), ("model=llama3_70b", "hardware=h100")


def rows_of(gpus: int, *words: str, host: bool = True) -> list[search.Row]:
    return search.search(compose_unchecked(*COMMON, *words), gpus, host=host)[0]


@pytest.mark.parametrize(
    ("gpus", "words", "modes", "unless"),
    [
        (1, ONE_H200, {"none"}, ()),  # the states' 60 GiB are enough, and then nothing is recomputed
        (8, EIGHT_H100, {"offload"}, ()),  # it fits only with both
        (
            8,
            EIGHT_H100,
            {"offload"},
            ("optimizer.offload=true",),
        ),  # the line offloads states, and one layout does not fit
    ],
)
def test_what_fits_no_other_way_is_found_with_the_hosts_memory(gpus, words, modes, unless):
    assert {row.prediction.fits for row in rows_of(gpus, *words, host=False)} == {"no"}
    rows = rows_of(gpus, *words, *unless)
    assert rows and {row.prediction.fits for row in rows} <= {"yes", "tight"} and rows[0].prediction.fits == "yes"
    assert {row.prediction.job.ac.name for row in rows} == modes
    for row in rows:
        job = freeze(compose_unchecked(*words, *COMMON, "cluster=slurm", *row.overrides.split(" ")))
        again = predict.predict(job)
        assert not check(job) and job.optimizer.offload and memory.on_the_host(job) > 0
        assert (again.peak.gib, again.speed.tokens_per_second) == pytest.approx(
            (row.prediction.peak.gib, row.prediction.speed.tokens_per_second)
        )


def test_a_search_is_as_before_where_something_fits_or_copies_have_no_rate():
    words = ("model=llama3_8b", "hardware=h100")
    assert rows_of(8, *words) == rows_of(8, *words, host=False)
    unknown = ("hardware.host_gbs=null",)
    assert rows_of(1, *ONE_H200, *unknown) == rows_of(1, *ONE_H200, *unknown, host=False)


def test_the_advice_tells_what_the_hosts_memory_costs(capsys):
    line = ["plan", *COMMON, *ONE_H200, "--gpus", "1"]
    assert cli.main(line) == 0
    out = capsys.readouterr().out
    (cost,) = [text for text in out.splitlines() if text.startswith("optimizer.offload=true: ")]
    (row,) = rows_of(1, *ONE_H200)
    alone = predict.predict(predict.changed(row.prediction.job, optimizer={"offload": False}))
    slower = alone.speed.tokens_per_second / row.prediction.speed.tokens_per_second - 1
    assert f"{slower:.1%} longer" in cost and f"{alone.peak.gib:.1f} GiB" in cost and slower > 0
    assert "optimizer.offload=true" in out.splitlines()[-1]
    assert cli.main([*line, "--json"]) == 0
    (values,) = json.loads(capsys.readouterr().out)
    assert values["host_gib"] == pytest.approx(8 * 8_030_261_248 / 2**30, rel=1e-4)  # two moments in float32
    assert cli.main(["plan", *COMMON, *ONE_H200, "--gpus", "1,8"]) == 0
    curve = capsys.readouterr().out
    assert f"1: {cost}" in curve and "8: optimizer.offload" not in curve
