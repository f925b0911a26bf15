"""What a user may type to name a run: a hash, the run's name, or a cell's name. A word that fits several runs is
refused with their names.
"""

import os
from pathlib import Path

import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.run import layout
from titan_hydra.experiments.runs.view import choose, choose_one, place_of


@pytest.fixture
def runs(tmp_path):
    for name in ("protein-aaaaaaaa", "wide-bbbbbbbb", "wide-cccccccc", "base-dddddddd", "base-large-eeeeeeee"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    for sweep, cells in (
        ("old-1", {"tall": "wide-bbbbbbbb", "thin": "base-dddddddd"}),
        ("new-2", {"tall": "wide-cccccccc", "short one": "base-dddddddd", "same": "base-large-eeeeeeee"}),
        ("newest-3", {"same": "base-large-eeeeeeee"}),
    ):
        folder = layout.SWEEPS.of(tmp_path) / sweep
        folder.mkdir(parents=True)
        entries = [{"name": name, "overrides": [], "directory": run} for name, run in cells.items()]
        layout.SWEEP.write(folder, {"name": sweep.partition("-")[0], "command": [], "baseline": None, "cells": entries})
        time = int(sweep[-1])
        os.utime(layout.SWEEP.of(folder), (time, time))
    return tmp_path


@pytest.mark.parametrize(
    ("target", "run"),
    [
        # the cell of this name, from the newest sweep that has one
        ("protein", "protein-aaaaaaaa"),
        ("thin", "base-dddddddd"),
        ("tall", "wide-cccccccc"),
        ("aaaa", "protein-aaaaaaaa"),
        ("base", "base-dddddddd"),
        ("base-large", "base-large-eeeeeeee"),
        ("short one", "base-dddddddd"),
        ("same", "base-large-eeeeeeee"),
    ],
)
def test_names_serve_as_hashes_do(runs, target, run):
    assert [cell.directory.name for cell in choose(target, runs).cells] == [run]


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("wide", "wide: could be any of 2: wide-bbbbbbbb, wide-cccccccc"),
        ("protien", "did you mean protein"),
        ("short on", "did you mean short one"),
        ("bbbbbbbc", "did you mean bbbbbbbb"),
    ],
)
def test_what_fits_several_or_none_is_one_line_with_names(runs, target, said):
    with pytest.raises(ConfigError) as raised:
        choose(target, runs)
    assert said in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(("target", "run"), [("protein", "protein-aaaaaaaa"), ("thin", "base-dddddddd")])
def test_a_folder_without_a_run_or_a_model_hides_no_name(runs, tmp_path, monkeypatch, target, run):
    (tmp_path / "here" / target).mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    assert place_of(target, runs) == runs / run
    Path(target, "config.json").write_text("{}")  # a model of Hugging Face's form
    assert place_of(target, runs) == Path(target)
    Path("none").mkdir()
    assert place_of("none", runs) == Path("none")


@pytest.fixture
def study(runs):
    """Start `-m name=study optimizer.lr=...` twice: run directories are created one after the other."""
    for place, lrs in (
        ("lr-4", {"0.1": "study-abababab"}),
        ("lr-5", {"0.1": "study-abababab", "0.2": "study-cdcdcdcd"}),
    ):
        folder = layout.SWEEPS.of(runs) / place
        folder.mkdir()
        entries = [{"name": f"optimizer.lr={lr}", "overrides": [], "directory": run} for lr, run in lrs.items()]
        layout.SWEEP.write(folder, {"name": "lr", "command": [], "baseline": None, "cells": entries})
        os.utime(layout.SWEEP.of(folder), (int(place[-1]),) * 2)
    (runs / "study-abababab/attempts").mkdir(parents=True)
    return runs


def test_the_name_of_all_runs_of_a_sweep_means_the_newest_such_sweep(study):
    (study / "study-cdcdcdcd/attempts").mkdir(parents=True)
    assert choose("study", study).manifest == layout.SWEEPS.of(study) / "lr-5"
    with pytest.raises(ConfigError) as raised:
        choose_one("study", study)
    assert (
        str(raised.value)
        == "study: 2 runs, and one is needed: optimizer.lr=0.1 (abababab), optimizer.lr=0.2 (cdcdcdcd)"
    )


def test_a_sweep_of_which_one_run_has_begun_has_the_name_already(study):
    assert choose("study", study).manifest == layout.SWEEPS.of(study) / "lr-5"


def test_another_run_of_that_name_is_a_choice_beside_the_sweep(study):
    (study / "study-eeffeeff/attempts").mkdir(parents=True)
    with pytest.raises(ConfigError, match="study: could be any of 2: study-eeffeeff, lr-5"):
        choose("study", study)
