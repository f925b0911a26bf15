"""Test `titan checkpoint` on the files of a run: what it prints, and that it never deletes the last intact step."""

import json
import os

import pytest

from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.run import checkpoints


@pytest.fixture
def run(tmp_path):
    """Return a run directory with four complete steps (small files with real checksums), a damaged step, and the files
    that a kill has left.
    """
    steps = tmp_path / "runs/name-12345678/checkpoints"
    for number in (10, 20, 30, 40):
        step = steps / f"step-{number:08d}"
        step.mkdir(parents=True)
        (step / ".metadata").write_bytes(os.urandom(1000))
        size, crc = 1000, int(checkpoints.checksum(step / ".metadata"), 16)
        checkpoints.write_manifest(step, number, 4, {".metadata": (size, crc)})
    for name in ("step-00000050.writing", "step-00000035.damaged", "step-00000001.77.deleting"):
        (steps / name).mkdir()
    (steps.parent / "config.json").write_text(json.dumps({}))
    return steps.parent


@pytest.fixture
def validated(run):
    """Return the same run with validations at steps 10 to 40, and a config.json that says to keep the best checkpoint."""
    for number, loss in ((10, 3.0), (20, 2.0), (30, 2.5), (40, None)):
        step = run / f"checkpoints/step-{number:08d}"
        checkpoints.write_manifest(
            step, number, 4, {".metadata": (1000, int(checkpoints.checksum(step / ".metadata"), 16))}, loss
        )
    rows = [
        {"event": "validation", "step": step, "validation_loss": loss}
        for step, loss in ((10, 3.0), (20, 2.0), (30, 2.5))
    ]
    (run / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run / "config.json").write_text(json.dumps({"model": {}, "checkpoint": {"keep_best": True}}))
    return run


def test_the_best_is_named_and_stays(validated, capsys):
    lines = titan(capsys, "ls", validated).splitlines()
    assert (
        "held out 2.0000 (lowest)" in lines[1] and lines[2].endswith("held out 2.5000") and "held out" not in lines[3]
    )
    titan(capsys, "prune", validated, "--keep", 1)
    assert names(validated) == ["step-00000020", "step-00000040"]


@pytest.mark.parametrize(
    ("lowest", "step", "answer"),
    [
        (2.0, None, ""),
        (2.0, "30", "checkpoints/step-00000030"),
        (2.0, "best", "checkpoints/step-00000020"),
        (
            1.5,
            "best",
            "--step=best: the lowest held-out loss, 1.5000 of step 35, is not kept; checkpoint.keep_best=true keeps it",
        ),
        (2.0, "35", "--step=35: name-12345678 has no such checkpoint; one of 10, 20, 30, 40, best"),
    ],
)
def test_a_checkpoint_is_asked_for_by_its_step_or_as_the_best(validated, monkeypatch, lowest, step, answer):
    with (validated / "events.jsonl").open("a") as file:
        file.write(json.dumps({"event": "validation", "step": 35, "validation_loss": lowest}) + "\n")
    if step != "best":
        # a long run has many events, so a step that is given by its number must be found without reading them
        monkeypatch.delattr(checkpoints, "lowest_held_out")
    if not answer.startswith("--"):
        assert checkpoints.asked_for(validated, step) == validated / answer
        return
    with pytest.raises(ConfigError) as refused:
        checkpoints.asked_for(validated, step)
    assert str(refused.value).startswith(answer)


def names(run):
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def titan(capsys, *arguments, status=0):
    assert cli.main(["checkpoint", *map(str, arguments)]) == status
    return "".join(capsys.readouterr())


def test_ls_and_verify(run, capsys):
    out = titan(capsys, "ls", "1234", "--runs", run.parent)
    assert [line.split()[0] for line in out.splitlines()] == [
        "step-00000010",
        "step-00000020",
        "step-00000030",
        "step-00000040",
        "step-00000001.77.deleting",
        "step-00000035.damaged",
        "step-00000050.writing",
    ]
    assert "4 ranks" in out.splitlines()[0] and "set aside as damaged" in out
    assert titan(capsys, "verify", run).count("intact") == 4
    os.truncate(run / "checkpoints/step-00000030/.metadata", 10)
    out = titan(capsys, "verify", run, status=1)
    assert "step-00000030  damaged: .metadata has 10 bytes instead of 1,000" in out and out.count("intact") == 3
    assert "intact" in titan(capsys, "verify", run / "checkpoints/step-00000020")


def test_prune_keeps_what_it_is_told_and_the_newest_intact_one(run, capsys):
    assert "step-00000010" in titan(capsys, "prune", run, "--keep", "2", "--dry") and len(names(run)) == 7
    titan(capsys, "prune", run, "--keep", "2", "--every", "20")
    assert names(run) == ["step-00000020", "step-00000030", "step-00000040"]
    for number in (30, 40):
        (run / f"checkpoints/step-000000{number}/.metadata").unlink()
    titan(capsys, "prune", run, "--keep", "1")
    assert names(run) == ["step-00000020", "step-00000040"]
    (run / "checkpoints/step-00000020/.metadata").unlink()
    assert "no checkpoint is intact" in titan(capsys, "prune", run, "--keep", "1", status=2)
    assert "keeps at least one" in titan(capsys, "prune", run, "--keep", "0", status=2)
