"""Test that tables fit a terminal of 80 columns and keep the hash by which a run is named."""

import random

import pytest

from titan_hydra.core.base.text import short_name, table


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def test_names_are_cut_before_columns_are_left_out_and_keep_their_hash():
    run = f"{'llama3_8b-fsdp_tp_pp-float8_rowwise' * 2}-e1ee3d75"
    titles = ("run", "cell", "ranks", "state")
    lines = table(titles, [(run, "optimizer.lr=0.001 " * 6, 64, "new")], gives=("cell", "run"), leaves=("ranks",))
    assert max(map(len, lines)) <= 80 and "-e1ee3d75  " in lines[1] and "ranks" in lines[0]


def test_columns_are_left_out_where_cutting_is_not_enough():
    titles = ("run", "first", "second")
    lines = table(titles, [("a-e1ee3d75", "x" * 40, "y" * 40)], gives=("run",), leaves=("second",))
    assert lines[0].split() == ["run", "first"] and "y" not in lines[1]


def test_a_name_keeps_some_characters_before_columns_are_cut_to_the_last():
    titles = ("technique", "first", "second")
    lines = table(titles, [("a" * 40, "x" * 40, "y" * 20)], gives=("technique",), leaves=("second",))
    assert lines[0].split() == ["technique", "first"] and max(map(len, lines)) <= 80 and "a" * 23 in lines[1]


def test_a_short_name_has_the_whole_hash():
    assert short_name("llama3_8b-fsdp_tp_pp-float8_rowwise-e1ee3d75", 18) == "llama3_8\N{HORIZONTAL ELLIPSIS}-e1ee3d75"
    assert short_name("second-a85a2c29", 18) == "second-a85a2c29"


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("right", [(), ("b", "c", "d", "e")])
def test_whatever_the_columns_no_line_is_longer_and_no_hash_is_cut(width, right, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    draw = random.Random(width)
    for _ in range(200):
        words = ["x" * draw.choice((1, 9, 40, 120)), "one word " * draw.choice((1, 3, 30)), "12,345.6"]
        rows = [
            (f"{'name' * draw.randrange(1, 40)}-{draw.randrange(2**32):08x}", *draw.choices(words, k=4))
            for _ in range(3)
        ]
        lines = table(tuple("abcde"), rows, right, gives=draw.choice([("a",), ()]))
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        assert all(row[0][-8:] in text for row in rows)
        if not right:  # what is broken is not lost
            assert all(text.count("x") >= word.count("x") for word in rows[0][1:])


def test_a_pipe_gets_whole_lines(monkeypatch):
    monkeypatch.setattr("sys.stdout.isatty", lambda: False)
    row = ("a" * 70 + "-e1ee3d75", "b" * 40)
    assert max(map(len, table(("run", "cell"), [row], gives=("run", "cell")))) > 80
