"""What may be typed for a run: a hash, the run's name, a cell's name; what fits several is refused with their names."""
import pytest

from titan_hydra.base.errors import ConfigError
from titan_hydra.runs import layout
from titan_hydra.runs.find import select_runs


@pytest.fixture
def runs(tmp_path):
    for name in ("protein-aaaaaaaa", "wide-bbbbbbbb", "wide-cccccccc", "base-dddddddd", "base-large-eeeeeeee"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    for sweep, cells in (("old-1", {"tall": "wide-bbbbbbbb", "protein": "base-dddddddd"}),
                         ("new-2", {"tall": "wide-cccccccc", "short one": "base-dddddddd", "same": "base-large-eeeeeeee"}),
                         ("newest-3", {"same": "base-large-eeeeeeee"})):
        folder = layout.SWEEPS.of(tmp_path) / sweep
        folder.mkdir(parents=True)
        layout.SWEEP.write(folder, {"name": sweep.partition("-")[0], "created": 0, "user": "me", "command": [], "baseline": None,
                                    "packed": False, "arrays": [], "cells": [
                                        {"name": name, "overrides": [], "hash": run[-8:], "directory": run} for name, run in cells.items()]})
    return tmp_path


@pytest.mark.parametrize(("target", "run"), [
    ("protein", "protein-aaaaaaaa"),  # a run's own name comes before a cell's
    ("aaaa", "protein-aaaaaaaa"), ("base", "base-dddddddd"), ("base-large", "base-large-eeeeeeee"), ("short one", "base-dddddddd"),
    ("same", "base-large-eeeeeeee"),  # two sweeps have it, as the same run
])
def test_names_serve_as_hashes_do(runs, target, run):
    assert [cell.directory.name for cell in select_runs(target, runs).cells] == [run]


@pytest.mark.parametrize(("target", "said"), [
    ("wide", "wide: could be any of 2: wide-bbbbbbbb, wide-cccccccc"), ("tall", "tall: could be any of 2: wide-bbbbbbbb, wide-cccccccc"),
    ("protien", "did you mean protein"), ("short on", "did you mean short one"), ("bbbbbbbc", "did you mean bbbbbbbb"),
])
def test_what_fits_several_or_none_is_one_line_with_names(runs, target, said):
    with pytest.raises(ConfigError) as raised:
        select_runs(target, runs)
    assert said in str(raised.value) and "\n" not in str(raised.value)
