"""`titan resume` lets the same run go on in another layout, with the losses of the undisturbed run, and refuses whatever
would change what it learns.
"""

import json

import pytest

from titan_hydra import cli
from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config import identity, to_dict
from titan_hydra.core.job.config.load import changes_of, known_keys
from titan_hydra.core.job.config.relayout import KEYS, SECTIONS
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.core.job.run.run import newest_attempt
from titan_hydra.experiments.compose.compose import compose_job
from titan_hydra.experiments.launch.layouts import relaid
from titan_hydra.experiments.runs import rundir

# Each attempt stops after three steps while the file `stop` exists.
THREE_STEPS = """
forward_backward, calls = trainer.Trainer.forward_backward, []
def stopping(self, batch):
    calls.append(1)
    if len(calls) == 3 and os.path.exists("stop"):
        self.stop_requested.append(15)
    return forward_backward(self, batch)
trainer.Trainer.forward_backward = stopping
"""
LINE = (
    "debug=tiny",
    "precision=fp32",
    "steps=12",
    "gpus=4",
    "data.global_batch=12",
    "data.local_batch=1",
    "checkpoint.interval=2",
)
WAY = (  # the words of `titan resume`, and the layout that they mean
    ("gpus=2 parallelism=tp data.local_batch=4", "tp"),
    ("gpus=3 parallelism=fsdp data.local_batch=2", "fsdp"),
    ("gpus=4 parallelism=fsdp_pp pp_schedule=1f1b ac=full", "fsdp_pp"),
)


def rows(directory, name="metrics"):
    return [json.loads(row) for row in (directory / f"{name}.jsonl").read_text().splitlines()]


RUNS = {  # what is trained beside the plain decoder with AdamW
    "adamw": (),
    "muon": ("optimizer=muon",),
    "experts": ("model=qwen3_moe_debug", "parallelism=fsdp_ep"),
    "lora": ("adapter=lora",),
    "chat": ("data=embedded_chat", "data.seq_len=64"),
    "split masters": ("precision.compute_dtype=bfloat16", "optimizer.masters=split"),
}


@pytest.mark.parametrize(
    "more", [pytest.param(more, id=name, marks=[pytest.mark.slow] * bool(more)) for name, more in RUNS.items()]
)
def test_a_run_goes_on_in_four_layouts_and_learns_the_same(launcher, more):
    assert launcher.run(*LINE, *more, "name=whole").returncode == 0
    (whole,) = launcher.folder.glob("runs/whole-*")
    (launcher.folder / "stop").touch()
    launcher.sabotage(THREE_STEPS)
    assert launcher.run(*LINE, *more, "name=moved").returncode == 75
    (moved,) = launcher.folder.glob("runs/moved-*")
    for number, (words, name) in enumerate(WAY, start=2):
        if number == 4:
            (launcher.folder / "stop").unlink()
        done = launcher.python("-m", "titan_hydra.cli", "resume", "moved", *words.split())
        assert done.returncode == (0 if number == 4 else 75), done.stdout + done.stderr
        assert f"with parallelism={name} on" in done.stdout, done.stdout
    assert [row["step"] for row in rows(moved)] == list(range(1, 13))
    assert {row["parallelism"]: row["step"] for row in rows(moved, "events") if row["event"] == "layout"} == {
        "tp": 3,
        "fsdp": 6,
        "fsdp_pp": 9,
    }
    close = 1e-5 if layout.CONFIG.read(moved)["precision"]["compute_dtype"] == "float32" else 2e-3
    for row, other in zip(rows(moved), rows(whole), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=close), row
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=10 * close), row
    assert layout.RESULT.read(moved)["hash"] == moved.name.rpartition("-")[2] == whole.name.rpartition("-")[2]
    told = launcher.python(
        "-m", "titan_hydra.cli", "report", "runs", "--allow", "parallelism", "--allow", "gpus", "--allow", "code"
    )
    assert "moved: its layout changed, and its rates are those of the last one: steps 1 to 3" in told.stdout, told
    assert "steps 10 to 12: parallelism=fsdp_pp on 4 ranks" in told.stdout, told
    assert "is done; titan resume" in launcher.python("-m", "titan_hydra.cli", "resume", "moved", "gpus=2").stderr


# Each attempt but the last stops after 15 steps; every rank records which samples it took in which step.
SAMPLES = """
import hashlib, json
forward_backward, lr_factor, steps = trainer.Trainer.forward_backward, loop.lr_factor, []
def at(step, *given):
    steps.append(step)
    return lr_factor(step, *given)
def recording(self, batch):
    columns = [batch[name] for name in ("tokens", "labels")]  # a layout's attention adds columns of its own
    samples = [hashlib.sha256(b"".join(column[row].numpy().tobytes() for column in columns)).hexdigest()
               for row in range(batch.samples)]
    with open(f"{self.job.name}-{os.getpid()}.jsonl", "a") as file:
        print(json.dumps([steps[-1], self.mesh.data_rank, samples]), file=file)
    if len(steps) == 15 and self.job.name == "moved" and os.path.exists("stop"):
        self.stop_requested.append(15)
    return forward_backward(self, batch)
loop.lr_factor, trainer.Trainer.forward_backward = at, recording
"""
FAR = ("gpus=2 parallelism=fsdp_tp", "gpus=3 parallelism=pp parallelism.pp=3 data.local_batch=12")


def samples_of(folder, name):
    """Return the samples of each step of a run, over all its data-parallel ranks; ranks with the same data agree."""
    taken = {}
    for file in folder.glob(f"{name}-*.jsonl"):
        for step, rank, samples in map(json.loads, file.read_text().splitlines()):
            assert taken.setdefault((step, rank), samples) == samples, (file, step)
    return [[sample for key in sorted(taken) if key[0] == step for sample in taken[key]] for step in range(1, 61)]


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_sixty_steps_in_four_layouts_learn_the_same_from_each_sample_once(launcher, name):
    """Print a row of the table in docs/reliability.md: pytest -s -m slow -k sixty tests/experiments/runs/test_resume.py"""
    back = (
        "gpus=4 parallelism=fsdp_ep data.local_batch=3"
        if name == "experts"
        else "gpus=4 parallelism=fsdp data.local_batch=3"
    )
    line = [*LINE, *RUNS[name], "steps=60", "model.n_layers=3", "checkpoint.interval=0"]
    launcher.sabotage(SAMPLES)
    assert launcher.run(*line, "gpus=1", "parallelism=single", "name=whole").returncode == 0
    (launcher.folder / "stop").touch()
    assert launcher.run(*line, "name=moved").returncode == 75
    for words in (*FAR, back):
        if words == back:
            (launcher.folder / "stop").unlink()
        done = launcher.python("-m", "titan_hydra.cli", "resume", "moved", *words.split())
        assert done.returncode == (0 if words == back else 75), done.stdout + done.stderr
    (whole,), (moved,) = launcher.folder.glob("runs/whole-*"), launcher.folder.glob("runs/moved-*")
    assert [row["step"] for row in rows(moved)] == list(range(1, 61))
    assert [event["step"] for event in rows(moved, "events") if event["event"] == "layout"] == [15, 30, 45]
    far = {
        key: max(abs(row[key] / other[key] - 1) for row, other in zip(rows(moved), rows(whole), strict=True))
        for key in ("loss", "grad_norm")
    }
    mine, theirs = (samples_of(launcher.folder, run) for run in ("moved", "whole"))
    every = [sample for step in mine for sample in step]
    other = sum(sorted(one) != sorted(two) for one, two in zip(mine, theirs, strict=True))
    print(f"\n| {name} | 60 | {far['loss']:.1e} | {far['grad_norm']:.1e} | {len(every)} | {other} |")
    assert [len(step) for step in mine] == [12] * 60 and other == 0
    close = 1e-5 if layout.CONFIG.read(moved)["precision"]["compute_dtype"] == "float32" else 2e-3
    # Muon orthogonalizes in bfloat16: in 60 steps, accumulation alone changes a loss of one process by 6e-5
    close = 2e-4 if name == "muon" else close
    assert far["loss"] < close and far["grad_norm"] < 10 * close


@pytest.fixture
def a_run(tmp_path, monkeypatch):
    """Return a function that writes the directory of a run that was interrupted."""
    monkeypatch.chdir(tmp_path)

    def make(*overrides):
        job = compose_job(*LINE, *overrides)
        directory = tmp_path / f"runs/{job.name}-{identity(job)}"
        layout.ATTEMPT.of(directory, 1).mkdir(parents=True)
        layout.CLAIM.write(
            layout.ATTEMPT.of(directory, 1),
            {"executor": "local", "pid": 1, "host": "elsewhere", "born": None, "started": 0.0, "ended": 1.0},
        )
        layout.CONFIG.write(directory, to_dict(job))
        layout.OVERRIDES.of(directory).write_text("".join(f"{word}\n" for word in (*LINE, *overrides)))
        return directory

    return make


@pytest.mark.parametrize(
    ("overrides", "words", "message"),
    [
        ((), ["optimizer.lr=1"], "is part of the experiment"),
        ((), ["precision=bf16"], "precision"),
        ((), ["precision.compute_dtype=bfloat16"], "is part of the experiment"),
        ((), ["data.global_batch=24"], "is part of the experiment"),
        ((), ["seed=2"], "is part of the experiment"),
        ((), ["gpus=5"], "data.global_batch=12: not a multiple of 5"),
        ((), ["gpus=2", "parallelism=fspd"], "fsdp"),
        ((), ["gpuss=2"], "did you mean gpus"),
        ((), ["gpus=2", "data.local_batch=9"], "data.global_batch=12: not a multiple of 18"),
        (("fault_tolerance=diloco", "fault_tolerance.replicas=2", "gpus=2"), ["gpus=1"], "keeps its layout"),
    ],
)
def test_what_cannot_be_is_one_line(a_run, capsys, overrides, words, message):
    directory = a_run(*overrides)
    before = {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()}
    assert int(cli.main(["resume", str(directory), *words])) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1, err
    assert {file: file.read_bytes() for file in directory.rglob("*") if file.is_file()} == before


def test_degrees_that_are_not_given_follow_from_the_ranks():
    job = compose_job(*LINE)
    for words, ranks, shard in (
        ("gpus=2", 2, 2),
        ("gpus=6", 6, 6),
        ("parallelism=tp", 2, 1),
        ("gpus=6 parallelism=fsdp_tp", 6, 3),
        ("parallelism.tp=2", 4, 2),
    ):
        new = relaid(job, words.split())
        assert (new.gpus, new.parallelism.dp_shard, new.data.global_batch) == (ranks, shard, 12), words
    copies = compose_job(*LINE, "parallelism=ddp")
    assert relaid(copies, ["gpus=2"]).parallelism.dp_replicate == 2


def test_only_the_layout_may_differ_from_what_the_hash_says(a_run):
    directory = a_run()
    job = load_job(directory)
    layout.FIRST_CONFIG.write(directory, layout.CONFIG.read(directory))
    new = relaid(job, ["gpus=2", "ac=full"])
    layout.CONFIG.write(directory, to_dict(new))
    assert load_job(directory) == new
    new.optimizer.lr = 1.0
    layout.CONFIG.write(directory, to_dict(new))
    with pytest.raises(ConfigError, match="it was changed after it was submitted"):
        load_job(directory)


@pytest.mark.parametrize(
    ("key", "value", "end"),
    [
        ("launch.require_card", True, "delete it from this file"),
        ("cluster.of_former_days", {"a": 1}, "delete it from this file"),
        ("notebook", "yes", "delete it from this file"),
        ("checkpoint.initial_hf", "/weights", "delete it from this file"),
        ("optimizer.name", "former", "in env.json)"),
        ("model.family", "former", "in env.json)"),
    ],
)
def test_each_key_or_option_that_has_left_is_answered_in_a_line(a_run, capsys, key, value, end):
    directory = a_run()
    for file in (layout.CONFIG, layout.FIRST_CONFIG):
        layout.FIRST_CONFIG.write(directory, layout.CONFIG.read(directory))
        content = good = file.read(directory)
        *above, last = key.split(".")
        content = json.loads(json.dumps(good))
        (content[above[0]] if above else content).update({last: value, "former": 2} if above else {last: value})
        file.write(directory, content)
        for words in ((), ("gpus=2",), ("steps=24",)):
            assert cli.main(["resume", str(directory), *words]) == 2
            lines = capsys.readouterr().err.splitlines()
            wrong = [line for line in lines if f"{file.name}: {key}=" in line]
            assert len(wrong) == 1 and wrong[0].endswith(end), lines
            assert all(line.startswith(str(directory)) for line in lines)
        file.write(directory, good)
    assert load_job(directory)


def test_a_section_that_is_missing_is_named(a_run):
    directory = a_run()
    content = layout.CONFIG.read(directory)
    del content["profiling"]
    layout.CONFIG.write(directory, content)
    with pytest.raises(ConfigError, match=r"config\.json: profiling=null: .*in env\.json"):
        load_job(directory)


def test_a_wrong_first_configuration_is_named_and_the_line_mends_it(a_run):
    directory = a_run()
    first = load_job(directory)
    good = layout.CONFIG.read(directory)
    layout.CONFIG.write(directory, to_dict(relaid(first, ["gpus=2", "ac=full"])))
    for wrong in (good | {"data": good["data"] | {"local_batch": 5}}, good | {"gpus": None}, {"model": {}}, None):
        layout.FIRST_CONFIG.of(directory).write_text("" if wrong is None else json.dumps(wrong))
        with pytest.raises(ConfigError, match=r"config_first\.json: .*was changed"):
            load_job(directory)
        number = newest_attempt(directory)
        rundir.end_attempt(layout.ATTEMPT.of(directory, number))
        assert rundir.claim(directory, number + 1, first, [])
        assert load_job(directory) == first and layout.FIRST_CONFIG.read(directory) == good
        layout.CONFIG.write(directory, to_dict(relaid(first, ["gpus=2", "ac=full"])))


def test_no_key_that_may_change_changes_what_is_learned():
    for key in known_keys():
        if key in KEYS or key.split(".")[0] in SECTIONS:
            assert "learning" not in changes_of(key)[1], key


def test_words_that_do_not_go_together_are_one_line(tmp_path, capsys):
    (tmp_path / "runs").mkdir()
    for words, line in {
        ("x", "--step", "3"): "--step 3: goes with steps=N",
        ("x", "gpus=2", "--step", "3"): "--step 3: goes with steps=N",
        ("x", "gpus=2", "--only", "oom"): "--only: goes without KEY=VALUE, here gpus=2",
        ("x", "steps=2", "--as-is"): "--as-is: goes without KEY=VALUE, here steps=2",
        ("gpus=2",): "which run? titan resume RUN gpus=2",
        ("steps=4", "launch.mode=dry"): "which run? titan resume RUN steps=4 launch.mode=dry",
    }.items():
        assert cli.main(["resume", *words, "--runs", str(tmp_path / "runs")]) == 2
        err = capsys.readouterr().err
        assert line in err and err.count("\n") == 1, err
