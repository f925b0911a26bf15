"""The state of a run while its ranks write."""
from titan_hydra.runs import rundir


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
