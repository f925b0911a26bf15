"""`titan report` copies all that a finished run has recorded to TensorBoard and wandb; the keys of metrics.wandb reach
wandb.
"""

import json

import pytest
import wandb

from tests.kits.wandb_file import records, rows
from titan_hydra import cli
from titan_hydra.core.job.config import identity, to_dict
from titan_hydra.experiments.compose.compose import compose_job


@pytest.fixture
def run(tmp_path):
    """Return a run without a tracker: three rows, two validations, a checkpoint, and a value that is not a number."""
    job = compose_job("debug=tiny", "notes=a try")
    directory = tmp_path / f"runs/{job.name}-{identity(job)}"
    (directory / "attempts/1").mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(to_dict(job)))
    metrics = [{"step": step, "loss": 9.0 - step, "mfu": None} for step in (1, 2, 4)]
    events = [
        {"event": "validation", "step": 2, "validation_loss": 7.5, "seconds": 1.0},
        {"event": "checkpoint", "step": 3, "seconds": 2.0, "reason": "asked"},
        {"event": "validation", "step": 4, "validation_loss": 6.5, "seconds": 1.0},
    ]
    for name, lines in (("metrics", metrics), ("events", events)):
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    yield directory
    wandb.teardown()  # else ranks that later tests start would use this process's wandb service


def scalars(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(directory / "tensorboard"))
    accumulator.Reload()
    return {
        name: [(point.step, point.value) for point in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }


def test_tensorboard_has_all_that_was_recorded_once(run, capsys):
    for _ in range(2):
        assert cli.main(["report", str(run), "--to", "tensorboard"]) == 0
    assert f"tensorboard --logdir {run.parent}" in capsys.readouterr().out
    assert scalars(run) == {
        "loss": [(1, 8.0), (2, 7.0), (4, 5.0)],
        "validation/validation_loss": [(2, 7.5), (4, 6.5)],
        "validation/seconds": [(2, 1.0), (4, 1.0)],
        "checkpoint/seconds": [(3, 2.0)],
    }


def test_wandb_has_all_that_was_recorded_and_what_its_keys_say(run, capsys):
    assert (
        cli.main(["report", str(run), "--to", "wandb", "metrics.wandb.tags=[wsd,small]", "metrics.wandb.entity=team"])
        == 0
    )
    assert "titan report " in capsys.readouterr().out
    wandb.teardown()  # wandb's service writes the file at its end, if not before
    (file,) = run.glob("wandb/offline-run-*/*.wandb")
    logged: dict[int, dict] = {}
    for row in rows(file):  # wandb may write the values of one step in two parts
        logged.setdefault(row["_step"], {}).update(
            {name: value for name, value in row.items() if not name.startswith("_")}
        )
    assert logged == {
        1: {"loss": 8.0},
        2: {"loss": 7.0, "validation/validation_loss": 7.5, "validation/seconds": 1.0},
        3: {"checkpoint/seconds": 2.0},
        4: {"loss": 5.0, "validation/validation_loss": 6.5, "validation/seconds": 1.0},
    }
    about = next(record.run for record in records(file) if record.HasField("run"))
    assert (about.run_id, about.display_name, about.entity) == (run.name.rpartition("-")[2], run.name, "team")
    assert (list(about.tags), about.notes) == (["wsd", "small", run.name.rpartition("-")[2]], "a try")


def test_what_cannot_be_is_one_line(run, capsys, monkeypatch):
    def refused(*words):
        status = cli.main(["report", str(run), *words])
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        return int(status), err

    status, line = refused("--to", "wandb", "seed=3")
    assert status == 2 and line.startswith(
        f"{run.name}: seed=3: is part of the experiment, which stays the same; another one goes on "
    )
    monkeypatch.setattr("wandb.init", lambda **_: 1 / 0)
    assert refused("--to", "wandb") == (1, f"{run.name}: wandb failed, nothing was copied: division by zero\n")
    (run / "metrics.jsonl").unlink()
    assert refused("--to", "tensorboard") == (2, f"{run.name}: has recorded nothing yet\n")


def test_a_damaged_run_does_not_stop_the_others(run, capsys):
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "lo')
    damaged = run.with_name("other-12345678")
    damaged.mkdir()
    (damaged / "config.json").write_text("{")
    assert cli.main(["report", str(run.parent), "--to", "tensorboard"]) == 2
    out, err = capsys.readouterr()
    assert f"{run.name}: copied to tensorboard" in out and err.startswith("other-12345678: ") and err.count("\n") == 1
    assert scalars(run)["loss"] == [(1, 8.0), (2, 7.0), (4, 5.0)]
