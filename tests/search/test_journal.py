"""Optuna's journal as the state of a search: what is drawn does not depend on kills, and a broken last line is cut."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from titan_hydra.base.errors import ConfigError
from titan_hydra.config.parts import OptunaSearch
from titan_hydra.search.journal import COMPLETE, FAILED, PRUNED, Journal, locked
from titan_hydra.search.space import space_of

LINES = ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "model.n_layers=tag(int,interval(1,4))", "ac=none,op")


def space(*lines: str):
    return space_of([OverridesParser.create().parse_override(line) for line in lines])


def drawn(folder, search, count: int, anew: bool) -> list[list[str]]:
    """Draw trials, each from a journal that is opened anew, or all from one; some fail, some wait at a length."""
    folder.mkdir()
    journal = Journal(folder)
    for number in range(count):
        if anew:
            journal = Journal(folder)
        trial = journal.draw(space(*LINES), search)
        if number % 5 == 1:
            journal.tell(trial, FAILED, reason="a node")
        elif number % 5 == 2:
            journal.tell(trial, PRUNED, reason="not finite")
        else:
            journal.report(trial, 10, number % 7 + trial.params["optimizer.lr"])
            if number % 5 == 3:
                journal.tell(trial, COMPLETE, [1.0])
    return [trial.overrides for trial in Journal(folder).trials()]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_what_is_drawn_depends_on_the_journal_alone(tmp_path, sampler):
    search = OptunaSearch("optuna", trials=20, sampler=sampler)
    one, other = drawn(tmp_path / "one", search, 16, False), drawn(tmp_path / "two", search, 16, True)
    assert one == other and len({*map(tuple, one)}) == 16
    rates = [float(trial[0].partition("=")[2]) for trial in one]
    assert all(1e-4 <= rate <= 1e-1 and len(f"{rate:g}") < 12 for rate in rates)
    assert {trial[1] for trial in one} <= {f"model.n_layers={number}" for number in range(1, 5)}


def test_no_trial_is_drawn_twice_and_the_space_may_end(tmp_path):
    for sampler in ("tpe", "random", "grid"):
        (tmp_path / sampler).mkdir()
        journal, few = Journal(tmp_path / sampler), space("ac=none,op", "model.n_layers=1,2,3")
        search = OptunaSearch("optuna", sampler=sampler)
        found = []
        while trial := journal.draw(few, search):
            journal.tell(trial, COMPLETE, [float(trial.number)])
            found.append(tuple(trial.overrides))
        assert len(found) == len({*found}) == 6, sampler


def test_one_driver_at_a_time_and_an_unfinished_line_is_cut(tmp_path):
    journal = Journal(tmp_path)
    journal.draw(space(*LINES), OptunaSearch("optuna"))
    file = tmp_path / "optuna.journal"
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"op_code":4,"wor')
    with locked(tmp_path):
        assert file.read_bytes() == whole
        with pytest.raises(ConfigError, match="another process drives this search"), locked(tmp_path):
            pass
    with locked(tmp_path):
        assert len(Journal(tmp_path).trials()) == 1
