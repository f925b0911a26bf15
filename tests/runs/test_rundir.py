"""The state of a run while its ranks write."""
from titan_hydra.runs import layout, rundir
from titan_hydra.runs.slurm import Queue


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


def test_a_job_that_slurm_does_not_know_runs_while_its_ranks_write(tmp_path):
    """As on the login node of another cluster that has the same name."""
    attempt = layout.ATTEMPT.of(tmp_path, 1)
    attempt.mkdir(parents=True)
    owner = {"pid": 1, "host": "login", "born": None, "started": 0.0, "executor": "slurm", "job_id": "7", "token": "abc", "user": "me"}
    rank = {"pid": 1, "host": "node", "born": None}
    layout.CLAIM.write(attempt, owner)
    layout.RANK.write(attempt, rank)
    assert rundir.state(tmp_path, Queue()).kind == "running" and "ended" not in layout.CLAIM.read(attempt)
    layout.RANK.write(attempt, rank | {"exit_status": 75, "ended": 1.0})
    assert rundir.state(tmp_path, Queue()).kind == "interrupted"
