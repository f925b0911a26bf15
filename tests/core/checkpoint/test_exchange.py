"""A folder of weights is replaced at once: its readers see the old one or the new one, and a failure leaves the old one."""

import shutil

import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint import convert


def write(folder, text):
    folder.mkdir(exist_ok=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text(text)


def read(folder):
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize("at_once", [True, False])
def test_the_old_folder_stays_until_the_new_one_is_there(at_once, tmp_path, monkeypatch):
    target, removed = tmp_path / "out", []
    write(target, "old")
    old = read(target)

    def remove(folder, **options):
        removed.append((folder.name == "out", read(target)))
        shutil_rmtree(folder, **options)

    shutil_rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove)
    if not at_once:  # as on a file system that cannot exchange two folders
        monkeypatch.setattr(convert, "EXCHANGE", 1 << 30)
    with pytest.raises(KeyboardInterrupt), convert.replacing(target) as new:
        write(new, "half")
        raise KeyboardInterrupt
    assert read(target) == old and [file.name for file in tmp_path.iterdir()] == ["out"]
    with convert.replacing(target) as new:
        write(new, "new")
        (new / "further").write_text("new")
        assert read(target) == old
    assert read(target) == {**dict.fromkeys(old, "new"), "further": "new"}
    assert removed == [(False, old), (False, read(target))]
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_what_is_no_folder_of_weights_is_not_replaced(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(ConfigError, match="--replace: "), convert.replacing(tmp_path / "mine") as new:
        write(new, "new")
    assert read(tmp_path / "mine") == {"thesis.tex": "x"}
