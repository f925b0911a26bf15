"""`titan resume` makes a run bitwise equal to one that had the new number of steps from its start, or it starts nothing
and prints a line with the reason.
"""

import json
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.checkpoint.convert import Reader
from titan_hydra.core.job.config import Job, from_dict, identity, to_dict
from titan_hydra.core.job.rules.checks import check
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.experiments.compose.change import change
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.launch import show
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.launch.longer import not_extended, steps_of_same_rates

WSD = (
    "debug=tiny",
    "precision=fp32",
    "lr_scheduler.decay_ratio=0.25",
    "checkpoint.interval=4",
    "checkpoint.keep_latest_k=0",
    "cluster=inline",
)


def learned(directory):
    """Return loss, gradient norm and learning rate by step."""
    rows = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: (row["loss"], row["grad_norm"], row["lr"]) for row in rows}


def weights(step):
    reader = Reader(step)
    return {
        name: reader.tensor(name.removeprefix("model."), entry.size, torch.float32)
        for name, entry in reader.metadata.state_dict_metadata.items()
        if name.startswith("model.")
    }


def test_the_default_run_leaves_a_checkpoint_from_which_a_longer_one_goes_on():
    job, longer = compose_job(), compose_job("steps=160")
    interval, last, kept = job.checkpoint.interval, steps_of_same_rates(job, longer), job.checkpoint.keep_latest_k
    saved = [*range(interval, job.steps, interval), job.steps][-kept:]
    assert any(step <= last for step in saved)


def test_an_extended_run_is_the_longer_run_bitwise(launcher):
    assert launcher.run("-m", *WSD, "steps=12,20").returncode == 0
    short, whole = (
        file.parent
        for steps in (12, 20)
        for file in launcher.folder.glob("runs/*/config.json")
        if json.loads(file.read_text())["steps"] == steps
    )
    extend = ("-m", "titan_hydra.cli", "resume", short.name, "steps=20")
    done = launcher.python(*extend)
    assert done.returncode == 0, done.stderr
    (longer,) = set(launcher.folder.glob("runs/llama3*")) - {short, whole}
    assert f"{longer.name}: continues from step 8 of {short.name}" in done.stdout
    assert f"train longer: titan resume {longer.name} steps=40" in done.stdout
    after = learned(longer)
    assert list(after) == list(range(9, 21))
    assert after == {step: row for step, row in learned(whole).items() if step > 8}
    ours, theirs = (weights(directory / "checkpoints/step-00000020") for directory in (longer, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    again = launcher.python(*extend)
    assert again.returncode == 0 and "done, 20 steps" in again.stdout and len(learned(longer)) == 12
    typed = (longer / "overrides.txt").read_text().splitlines()
    assert f"{longer.name}: done" in launcher.run(*typed).stdout, "the overrides that it keeps compose the same run"


@pytest.fixture
def a_run(tmp_path, monkeypatch, capsys):
    """Return two functions: the first makes a run directory with checkpoints of given steps, the second runs `titan
    extend` in it.
    """
    monkeypatch.chdir(tmp_path)

    def make(*overrides, steps=(4, 8, 12)):
        job = compose_job("debug=tiny", "steps=12", *overrides)
        directory = tmp_path / f"runs/{job.name}-{identity(job)}"
        for step in steps:
            folder = directory / f"checkpoints/step-{step:08d}"
            folder.mkdir(parents=True)
            for file in (".metadata", "rank_00000.json"):
                (folder / file).touch()
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_text(json.dumps(to_dict(job)))
        (directory / "overrides.txt").write_text("".join(f"{override}\n" for override in overrides))
        return directory

    def extend(directory, *words):
        status = cli.main(["resume", str(directory), "launch.mode=dry", *words])
        return int(status), *capsys.readouterr()

    return make, extend


SCHEDULES = {
    "wsd": ["lr_scheduler.decay_ratio=0.25"],
    "constant": ["lr_scheduler=constant"],
    "cosine": ["lr_scheduler=cosine"],
}


@pytest.mark.parametrize(
    "schedule, steps, origin",
    [
        ("wsd", 40, 8),  # with 12 steps the rate decays after step 10
        ("wsd", 10, 8),  # a decay that begins earlier, from the same checkpoint
        ("wsd", 8, 4),
        ("constant", 40, 12),
        ("constant", 13, 12),
        ("constant", 12, "steps=12: the run has this number of steps already"),
        ("wsd", 4, "no checkpoint before step 4"),
        ("wsd", 5, 4),
        ("cosine", 40, "differ from step 3 on"),
        ("cosine", 0, "steps=0"),
    ],
)
def test_the_checkpoint_is_the_newest_with_the_same_rates_before_it(a_run, schedule, steps, origin):
    make, extend = a_run
    directory = make(*SCHEDULES[schedule])
    status, out, err = extend(directory, f"steps={steps}")
    if isinstance(origin, int):
        assert (
            (status, err) == (0, "")
            and f"continues from step {origin} of {directory.name}" in out
            and "1 to start" in out
        )
    else:
        assert status == 2 and origin in err and err.count("\n") == 1
    assert len(list(directory.parent.iterdir())) == 1, "nothing was written"


def test_validation_may_change_on_the_way(a_run, tmp_path):
    make, extend = a_run
    text = tmp_path / "text.txt"
    text.write_text("some words " * 3000)
    directory = make(*SCHEDULES["wsd"], "data=text_files", f"data.path={text}")
    words = ("validation.name=on", "validation.interval=3", "validation.steps=2", f"data.validation_path={text}")
    status, out, err = extend(directory, "steps=40", *words)
    assert status == 0 and "continues from step 8" in out and "began before files were recorded" in err


def test_a_checkpoint_after_the_rates_have_parted_must_be_named(a_run):
    make, extend = a_run
    directory = make(*SCHEDULES["wsd"], steps=[12])
    status, _, err = extend(directory, "steps=40")
    assert status == 2 and "learning rates of 12 and 40 steps differ from step 11 on" in err and "--step 12" in err
    status, out, _ = extend(directory, "steps=40", "--step", "12")
    assert status == 0 and "continues from step 12" in out and "differ from step 11 on" in out
    status, _, err = extend(directory, "steps=40", "--step", "8")
    assert status == 2 and "--step=8: there is no such checkpoint; nearest legal: 12" in err


@pytest.mark.parametrize("steps, line", [([8, 12], "steps=24\n"), ([12], "steps=24 --step 12\n"), ([], "")])
def test_the_line_that_a_finished_run_prints_can_be_pasted(a_run, capsys, steps, line):
    make, extend = a_run
    directory = make(*SCHEDULES["wsd"], steps=steps)
    show.suggest_longer_run(SimpleNamespace(directory=directory, job=load_job(directory), runs=directory.parent))
    printed = capsys.readouterr().out
    assert printed.endswith(line) and bool(printed) == bool(line)
    if printed:
        assert extend(directory, *printed.split("steps=")[1].replace("24", "steps=24", 1).split())[0] == 0


def test_fewer_ranks_go_on_as_the_page_says(launcher):
    """As in docs/reliability.md: the losses equal those of the run on four ranks up to rounding, and the batch has the
    same size.
    """
    page = (launcher.ROOT / "docs/reliability.md").read_text().replace("\\\n", "")
    four, two = (shlex.split(line)[2:] for line in page.splitlines() if line.startswith("python launch.py gpus="))
    done = launcher.run(*launcher.TINY, *four)
    assert done.returncode == 0, done.stderr
    (wide,) = launcher.folder.glob("runs/four-*")
    done = launcher.run(*launcher.TINY, *(word.replace("four-HASH", wide.name) for word in two))
    assert done.returncode == 0 and "steps 7 to 12" in done.stdout, done.stdout + done.stderr
    (narrow,) = launcher.folder.glob("runs/two-*")
    before, after = learned(wide), learned(narrow)
    assert list(after) == list(range(7, 13))
    for step, row in after.items():
        assert row == pytest.approx(before[step], rel=1e-5), step
    refused = launcher.run(
        *launcher.TINY, *(word.replace("four-HASH", wide.name).replace("batch=16", "batch=8") for word in two)
    )
    assert refused.returncode == 2 and "data.global_batch" in refused.stdout + refused.stderr, (
        refused.stdout + refused.stderr
    )


@pytest.mark.parametrize(
    "overrides, words, message",
    [
        (
            (),
            ["optimizer.lr=1"],
            "own line and optimizer.lr=1 checkpoint.initial_load_path=RUN checkpoint.exclude_from_loading=[]",
        ),
        ((), ["steps=20", "checkpoint.intervall=3"], "did you mean checkpoint.interval=3 or"),
        ((), ["steps=many"], "steps=many: must be a whole number"),
        ((), ["steps=20", "checkpoint.interval=often"], "checkpoint.interval=often: must be a whole number"),
        (("checkpoint=off",), ["steps=20"], "no complete checkpoint"),
        (("fault_tolerance=diloco", "fault_tolerance.replicas=2"), ["steps=20"], "fault_tolerance=diloco"),
    ],
)
def test_what_cannot_be_is_one_line(a_run, overrides, words, message):
    make, extend = a_run
    status, _, err = extend(make(*overrides, steps=[] if "checkpoint=off" in overrides else [8]), *words)
    assert status == 2 and message in err and err.count("\n") == 1, err


def test_only_named_values_change():
    job = compose_job("debug=tiny", "cluster=slurm", "cluster.setup=['echo \\${HOME}']")
    other = change(job, ["metrics.trackers=[wandb]", "metrics.wandb.mode=online", "+cluster.environment={A: b}"])
    assert (other.metrics.wandb.mode, other.cluster.environment, other.metrics.trackers) == (
        "online",
        {"A": "b"},
        ["wandb"],
    )
    assert (
        job.metrics.trackers == []
        and from_dict(Job, to_dict(other)) == other
        and other.cluster.setup == job.cluster.setup
        and identity(job) == identity(other)
    )
    for word in (
        "steps=3",
        "cluster=slurm",
        "~name",
        "seed",
        "metrics.wandb.mode=sideways",
        "optimizer.muon_lr=1",
        "model.yarn.factor=2",
    ):
        with pytest.raises(ConfigError, match=r"^[^\n]+$"):
            change(job, [word])


def test_another_executor_has_its_own_keys():
    """`titan resume` may move a run to a cluster, and back."""
    here = compose_job("debug=tiny", "cluster.time_minutes=30")
    there = change(here, ["cluster.executor=slurm", "cluster.gpus_per_node=4", "cluster.partition=main"])
    assert (there.cluster.time_minutes, there.cluster.partition, there.cluster.sbatch) == (30, "main", {}) and check(
        there
    ) == []
    back = change(there, ["cluster.executor=local"])
    assert back.cluster == replace(here.cluster, gpus_per_node=4) and identity(here) == identity(there) == identity(
        back
    )
    with pytest.raises(ConfigError, match=r"cluster\.executor=local does not read it; slurm would"):
        change(there, ["cluster.executor=local", "cluster.partition=main"])


@pytest.mark.parametrize(
    ("words", "refused", "printed"),
    [
        ((), False, True),
        (("adapter=lora",), True, False),
        (("data=rollouts", "data.path=ROLLOUTS"), False, False),
        (("+data.mixture={a: {weight: 1, name: rollouts, path: ROLLOUTS}}", "data=mixture"), False, False),
    ],
)
def test_training_longer_is_offered_only_where_it_makes_sense(tmp_path, capsys, words, refused, printed):
    (tmp_path / "r.jsonl").write_text('{"tokens": [1, 2], "old_logprobs": [-1.0], "advantages": 1.0}\n')
    words = [word.replace("ROLLOUTS", f"{tmp_path}/r.jsonl") for word in words]
    own = ("objective=policy", "data.document_mask=true") if any("rollouts" in word for word in words) else ()
    job = compose_job("debug=tiny", *own, *words)
    assert (not_extended(job) is not None) is refused
    (tmp_path / "checkpoints/step-00000002").mkdir(parents=True)
    show.suggest_longer_run(Cell(1, [], job, tmp_path, 1))
    assert ("train longer" in capsys.readouterr().out) is printed
