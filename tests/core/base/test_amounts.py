import time

import pytest

from titan_hydra.core.base.amounts import ago, brief, in_bytes, lasting, on_a_clock, or_dash, time_of_day


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.00 KiB"), (1.5 * 2**20, "1.50 MiB"), (2**41, "2,048.00 GiB")],
)
def test_sizes(size, text):
    assert in_bytes(size) == text


@pytest.mark.parametrize(
    ("seconds", "clock", "words"),
    [
        (0, "0:00", "0 s"),
        (43.2, "0:43", "43.2 s"),
        (725, "12:05", "12.1 min"),
        (12_000, "3:20:00", "3.33 h"),
        (187_800, "2d 04:10", "2.17 days"),
    ],
)
def test_durations(seconds, clock, words):
    assert (on_a_clock(seconds), lasting(seconds)) == (clock, words)


def test_what_is_not_known_is_a_dash():
    assert (or_dash(None, ".4f"), on_a_clock(None), or_dash(0, ".1f"), or_dash(7)) == ("-", "-", "0.0", "7")


def test_a_moment_has_a_date_if_it_is_not_of_this_day():
    now = time.time()
    assert time_of_day(now)[:5] == ago(now) and len(ago(now - 400 * 86400)) == len("2025-11-27")


def test_numbers_are_brief():
    assert [brief(one) for one in (7, 999.6, 68_912, 999_600, 1.5e9, 2e12, 4e14)] == [
        "7",
        "1K",
        "68.9K",
        "1M",
        "1.5B",
        "2T",
        "400T",
    ]
