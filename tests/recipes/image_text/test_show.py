"""Test what the launcher and `titan data show` print about texts with images."""

import io
import json
import os
import tarfile

from tests.core.data.test_unknown import ROWS, letters, warned
from tests.experiments.report.test_changes import what_differs
from titan_hydra import cli
from titan_hydra.core.data import unknown
from titan_hydra.recipes.image_text import images

__all__ = ["letters"]


def test_images_are_shown_by_their_sizes(capsys):
    words = ["data", "show", "model=llama3_vision_debug", "data=synthetic_image_text"]
    assert cli.main([*words, "objective.patches=40", "--row", "5"]) == 2
    assert capsys.readouterr().err.startswith("objective.image_patches=")
    assert cli.main([*words, "--row", "5"]) == 0
    shown = capsys.readouterr().out
    assert (
        "[image of 7 x 3 patches]>>>green in black<<<[image of" in shown
        and "10,000 documents: 0 cannot be used, 0 have more" in shown
    )
    assert "or objective.patches=128 patches" in shown and "patches  documents" in shown


def test_captions_of_images_in_tars(tmp_path, letters, monkeypatch):
    """Images are not decoded; a sample that cannot be used is left out."""
    members = {"0.txt": b"a lone text", "index": b""}
    for number in range(100):
        parts = {"parts": [{"image": "jpg"}, {"text": ROWS[-1]}]}
        members |= (
            {f"{number}.jpg": b"pixels", f"{number}.json": json.dumps(parts).encode()}
            if number % 2
            else {f"{number}.png": b"pixels", f"{number}.txt": ROWS[-1].encode()}
        )
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name, content in members.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            tar.addfile(about, io.BytesIO(content))
    (tmp_path / "a.idx").write_text("an index of the tar")
    read, pread = [], os.pread
    monkeypatch.setattr(images.os, "pread", lambda *place: read.append(pread(*place)) or read[-1])
    (line,) = warned(
        "model=llama3_vision_debug",
        "data=image_text",
        f"data.path={tmp_path}",
        "objective=image_text",
        "tokenizer=hf",
        f"tokenizer.path={letters}",
    )
    assert line.startswith(f"data.path={tmp_path}: 60.0% of the tokens") and "'g', 't', " in line
    assert read and b"pixels" not in read and len(read) <= unknown.ROWS + 1


def test_the_report_knows_what_its_keys_change(flat):
    expected = {"objective.image_patches": {"work", "learning"}}
    assert {key: what_differs(flat, key) for key in expected} == expected
