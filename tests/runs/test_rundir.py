"""The state of a run while its ranks write."""
import json
from types import SimpleNamespace

from titan_hydra.base.errors import Kind
from titan_hydra.config import compose_job, to_dict
from titan_hydra.launch import show
from titan_hydra.runs import hints, rundir


def test_a_file_that_is_renamed_meanwhile_is_no_error(tmp_path, monkeypatch):
    """`write_json` writes `.beat_0.json.7` and renames it: a listing may name a file that is gone when its time is asked for."""
    gone = [tmp_path / ".beat_0.json.7", tmp_path / "beat_1.json"]
    monkeypatch.setattr(type(tmp_path), "iterdir", lambda folder: iter(gone))
    assert not rundir.heard_lately(tmp_path)
    (tmp_path / ".beat_0.json.7").touch()
    assert not rundir.heard_lately(tmp_path), "a file in the making may be left by a rank that died"
    (tmp_path / "beat_0.json").touch()
    gone.append(tmp_path / "beat_0.json")
    assert rundir.heard_lately(tmp_path)


def test_a_hint_names_a_checkpoint_only_where_there_is_one(tmp_path, monkeypatch):
    """Of a disk that was full at the first save, say."""
    (tmp_path / "config.json").write_text(json.dumps(to_dict(compose_job("debug=tiny"))))
    failure = SimpleNamespace(attempt=tmp_path / "attempts/1", kind=Kind.DISK)
    assert hints.hint(failure).endswith("then launch.retry=failed starts it from step 1")
    monkeypatch.setattr(hints.checkpoints, "complete", lambda folder: [folder / "step-00000005"])
    assert hints.hint(failure).endswith("then launch.retry=failed goes on from the newest checkpoint")


def test_the_last_word_of_a_run_whose_folder_is_gone(tmp_path):
    assert "was deleted while it ran" in show.last_word(tmp_path / "gone", rundir.State("new"))
    assert "before it could save" in show.last_word(tmp_path, rundir.State("interrupted", 1))
