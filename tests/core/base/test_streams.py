"""Whatever stands at the other end of a program's output, a user gets no traceback."""

import contextlib
import importlib
import io
import sys

import pytest

from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError, require_folder
from titan_hydra.core.base.text import all_printed, ready_to_print


def test_a_stream_that_cannot_encode_a_letter_prints_its_number(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), "ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    ready_to_print()
    print("ü", flush=True)
    assert stream.buffer.getvalue() == b"\\xfc\n"


def test_a_closed_stream_takes_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["status", "--runs", "/nowhere"]) == 2
    assert all_printed(0) == 0


def test_a_full_disk_is_one_line(monkeypatch, capsys):
    for text in ("little", "much " * 10_000):
        full = open("/dev/full", "w")  # noqa: SIM115 (closing it fails)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", full)
            patch.setattr(importlib, "import_module", lambda name, text=text: Printing(text))
            assert cli.main(["status"]) == 1
        with contextlib.suppress(OSError):
            full.close()
    assert capsys.readouterr().err.splitlines() == ["standard output cannot be written: No space left on device"] * 2


class Printing:
    """A command that prints."""

    def __init__(self, text: str) -> None:
        self.text = text

    def add_arguments(self, parser) -> None:
        pass

    def main(self, args) -> int:
        print(self.text)
        return 0


def test_a_folder_that_was_deleted_is_named(monkeypatch, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with pytest.raises(ConfigError, match="current folder"):
        require_folder()
    assert cli.main(["status"]) == 2
