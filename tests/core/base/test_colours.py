"""Test that a log has colours on a terminal alone."""

import sys

import pytest

from titan_hydra.core.base.text import with_colours

LOG = """03:04:05  step  8/72  loss 7.5614 (mean 8.2835)  norm 1.754
03:04:06  step  8/72  validation loss 7.8789  2.07 s
03:04:06  step  8/72  checkpoint saved  0.93 s
WARNING: a row is left out
it printed loss 3.0"""


def test_a_log_on_a_terminal_has_colours(monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    step, held_out, saved, warning, other = with_colours(LOG).splitlines()
    assert step.startswith("\x1b[2m03:04:05\x1b[0m  step") and "\x1b[36mloss 7.5614\x1b[0m (mean" in step
    assert "\x1b[36mvalidation loss 7.8789\x1b[0m" in held_out and "\x1b[32mcheckpoint saved\x1b[0m" in saved
    assert warning.startswith("\x1b[33m") and "\x1b" not in other


@pytest.mark.parametrize(("terminal", "variables"), [(False, {}), (True, {"NO_COLOR": "1"}), (True, {"TERM": "dumb"})])
def test_a_pipe_and_no_color_get_plain_lines(monkeypatch, terminal, variables):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert with_colours(LOG) == LOG
