"""Test which groups meet and when a meeting counts: boards of several groups run in threads of one process, heartbeats
stop, groups fall behind.
"""

import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from titan_hydra.core.train.fault_tolerance.quorum import Board, once

TIMEOUT = 2.0  # on a busy machine a heartbeat may be late by half of this


def never():
    """Never ask to stop, except if a test hangs."""
    return time.monotonic() > DEADLINE


DEADLINE = float("inf")


@pytest.fixture
def boards(tmp_path, monkeypatch):
    """Return `boards(n)`, which makes the boards of n groups that have begun together."""
    made = []
    monkeypatch.setitem(globals(), "DEADLINE", time.monotonic() + 300)

    def make(count):
        made.extend(Board(tmp_path, group, count, TIMEOUT, f"host:{group}") for group in range(count))
        together(made, lambda board: board.begin((0, 0), 10, never))
        return made

    yield make
    for board in made:
        board.close()


def together(boards, call):
    """Return the answer of each board to the same call, made at once in threads."""
    with ThreadPoolExecutor(len(boards)) as pool:
        return list(pool.map(call, boards))


def silence(board):
    """Stop the board's heartbeat without a message."""
    board.ended.set()
    board.thread.join()


def test_all_who_live_meet_and_read_the_same_decision(boards):
    three = boards(3)
    for step in (5, 10):
        first, *others = together(three, lambda board, step=step: board.convene((step - 5, step), never))
        assert all(other == first for other in others)
        assert (sorted(first.members), first.donors, first.takers, first.step) == ([0, 1, 2], [0, 1, 2], [], step)
        assert together(three, lambda board, meeting=first: board.settle(meeting, True)) == [True] * 3
    assert first.number == 2


def test_nobody_waits_for_a_silent_group_longer_than_its_timeout(boards):
    *living, dead = boards(3)
    silence(dead)
    began = time.monotonic()
    meetings = together(living, lambda board: board.convene((0, 5), never))
    assert [sorted(meeting.members) for meeting in meetings] == [[0, 1], [0, 1]]
    assert 0.5 * TIMEOUT < time.monotonic() - began < 10 * TIMEOUT


def test_a_group_that_slept_until_its_meeting_was_cleared_away_goes_on(boards, tmp_path):
    one, other = boards(2)
    meeting, _ = together([one, other], lambda board: board.convene((0, 5), never))
    shutil.rmtree(tmp_path / str(meeting.number))
    assert not one.settle(meeting, True)


def test_a_group_that_lives_is_waited_for(boards):
    one, late = boards(2)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one.convene, (0, 5), never)
        time.sleep(1.5 * TIMEOUT)
        assert not first.done()
        assert sorted(late.convene((0, 5), never).members) == [0, 1]
        assert sorted(first.result().members) == [0, 1]


def test_who_is_behind_takes_and_does_not_give(boards, tmp_path):
    one, other = boards(2)
    together([one, other], lambda board: board.settle(board.convene((0, 5), never), True))
    silence(other)
    back = Board(tmp_path, 1, 2, TIMEOUT, "host:1")
    assert back.begin((0, 0), 10, never)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(back.convene, (0, 0), never)
        while not (tmp_path / "2" / "present_1.json").exists() and not never():  # otherwise nobody would wait for it
            time.sleep(0.01)
        meeting = one.convene((5, 10), never)
        assert joining.result() == meeting
    assert (meeting.donors, meeting.takers, meeting.step, meeting.address) == ([0], [1], 10, "host:0")
    back.close()


def test_a_meeting_counts_only_if_it_went_well_for_all(boards):
    both = boards(2)
    meetings = together(both, lambda board: board.convene((0, 5), never))
    assert together(both, lambda board: board.settle(meetings[0], board is both[0])) == [False, False]
    again = together(both, lambda board: board.convene((0, 5), never))
    assert [meeting.number for meeting in again] == [2, 2]


def test_a_meeting_whose_member_dies_does_not_count(boards):
    one, other = boards(2)
    meeting, _ = together([one, other], lambda board: board.convene((0, 5), never))
    silence(other)
    assert one.settle(meeting, True) is False
    assert sorted(one.convene((0, 5), never).members) == [0]


def test_who_is_asked_to_stop_leaves_before_the_meeting(boards):
    one, other = boards(2)
    assert other.convene((0, 5), lambda: True) is None
    other.close()
    assert sorted(one.convene((0, 5), never).members) == [0]


def test_a_decision_is_made_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: once(tmp_path / "decision", {"by": number}), range(40)))
    first = json.loads((tmp_path / "decision").read_text())
    once(tmp_path / "decision", {"by": -1})
    assert json.loads((tmp_path / "decision").read_text()) == first
    assert [file.name for file in tmp_path.iterdir()] == ["decision"]
