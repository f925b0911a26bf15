"""Test that the contents of the files that a run reads belong to the run, wherever the same line is typed."""

import contextlib
import errno
import json
import os

import pytest

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job import inputs as files_of_jobs
from titan_hydra.core.job.config import Fault, identity
from titan_hydra.core.job.freeze import freeze
from titan_hydra.core.job.inputs import LITTLE, MANY, Input, inputs_of, look_anew, look_at
from titan_hydra.core.job.run import inputs, layout
from titan_hydra.experiments.compose.compose import compose_unchecked
from titan_hydra.experiments.runs import rundir

KINDS = {  # overrides that name a file words.txt of each kind
    "data": ("data=text_files", "data.path=words.txt"),
    "validation": ("data=text_files", "data.path=other.txt", "data.validation_path=words.txt", "validation=on"),
    "tasks": ("validation=on", "validation.tasks=[other.txt,words.txt]"),
    "tokenizer": ("tokenizer=hf", "tokenizer.path=words.txt"),
    "schedule": ("parallelism=fsdp_pp", "gpus=2", "pp_schedule=csv", "pp_schedule.csv=words.txt"),
    "mixture": ("data=mixture", "+data.mixture={own: {weight: 1, name: text_files, path: words.txt}}"),
    "template": ("data=chat", "data.path=other.txt", "data.chat_template=words.txt"),
}
WORD = {"mixture": "data", "template": "tokenizer"}


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Work in a folder with two files."""
    monkeypatch.chdir(tmp_path)
    for name in ("words.txt", "other.txt"):
        (tmp_path / name).write_text("first\n")
    look_anew()
    return tmp_path


def job_of(folder, *overrides: str):
    return freeze(compose_unchecked("debug=tiny", f"paths.runs={folder}/runs", *overrides))


def begun(folder, job):
    """Claim the next attempt of a run, as a launcher does, and end it."""
    directory = rundir.directory_of(job)
    attempt = rundir.claim(directory, rundir.newest_attempt(directory) + 1, job, [])
    rundir.end_attempt(attempt)
    return directory


def faults(job, directory):
    return [one for one in inputs.changes(job, directory, layout.runs_of(job)) if isinstance(one, Fault)]


def lines(job, directory):
    return [one for one in inputs.changes(job, directory, layout.runs_of(job)) if isinstance(one, str)]


@pytest.mark.parametrize("kind", KINDS)
def test_other_bytes_are_found_for_every_kind_of_file(desk, kind):
    job = job_of(desk, *KINDS[kind])
    directory = begun(desk, job)
    assert not list(inputs.changes(job, directory, desk / "runs"))
    (desk / "words.txt").write_text("other\n")  # the same length
    (fault,) = faults(job, directory)
    assert (
        fault.code == inputs.CHANGED and str(fault.value) == "words.txt" and f"[{WORD.get(kind, kind)}]" in fault.reason
    )
    job.launch.accept_changed = [WORD.get(kind, kind)]
    assert not faults(job, directory) and lines(job, directory)
    begun(desk, job)
    job.launch.accept_changed = []
    assert not list(inputs.changes(job, directory, desk / "runs")), "the accepted bytes are the run's own now"
    (accepted,) = layout.ENV.read(directory)["accepted"]
    assert accepted["key"].startswith(fault.key) and accepted["was"] != accepted["now"] and accepted["attempt"] == 2


def test_a_change_that_nobody_accepts_stays_a_change(desk):
    """A file that changes between the check and the claim is not taken for the run's own; the rank then refuses."""
    job = job_of(desk, *KINDS["data"])
    directory = begun(desk, job)
    (desk / "words.txt").write_text("other\n")
    begun(desk, job)
    assert faults(job, directory)


def test_the_same_bytes_elsewhere_are_said_and_a_relative_path_keeps_its_folder(desk, monkeypatch):
    job = job_of(desk, *KINDS["data"])
    directory = begun(desk, job)
    (desk / "there").mkdir()
    (desk / "there/words.txt").write_text("first\n")
    (desk / "there/empty").mkdir()
    monkeypatch.chdir(desk / "there")
    assert not faults(job, directory) and str(desk / "there/words.txt") in lines(job, directory)[0]
    monkeypatch.chdir(desk / "there/empty")
    assert [fault.code for fault in faults(job, directory)] == [inputs.CHANGED]
    with inputs.at_first_folder(job, directory):
        assert not list(inputs.changes(job, directory, desk / "runs"))
    environment = layout.ENV.read(directory)
    layout.ENV.write(directory, {**environment, "folder": str(desk / "gone")})
    with pytest.raises(ConfigError, match="no such folder"), inputs.at_first_folder(job, directory):
        pass


def test_a_run_from_before_files_were_recorded_is_taken_as_it_is(desk):
    job = job_of(desk, *KINDS["data"])
    directory = begun(desk, job)
    environment = layout.ENV.read(directory)
    del environment["files"]
    layout.ENV.write(directory, environment)
    (desk / "words.txt").write_text("other\n")
    assert not faults(job, directory) and len(lines(job, directory)) == 1
    begun(desk, job)
    assert not list(inputs.changes(job, directory, desk / "runs"))


def test_a_run_keeps_the_checkpoint_from_which_it_began(desk):
    """A run of weights has a newer step later; what counts is the step that was the newest when the run began."""
    job = job_of(desk, "checkpoint.initial_load_path=origin")
    steps = [layout.CHECKPOINTS.of(desk / "origin") / f"step-{step}" for step in (1, 2)]
    for step in steps:
        step.mkdir(parents=True)
        (step / "weights.distcp").write_text(step.name)
        (step / ".metadata").touch()
        layout.MANIFEST.of(step).write_text(json.dumps({"format": 1, "step": 1, "files": {}}))
        if step == steps[0]:
            directory = begun(desk, job)
    assert inputs.files_at_start(directory)["checkpoint.initial_load_path"]["path"] == str(steps[0])
    assert not list(inputs.changes(job, directory, desk / "runs"))
    (steps[0] / "weights.distcp").write_text("other")
    assert [fault.key for fault in faults(job, directory)] == ["checkpoint.initial_load_path"]


def test_the_weights_of_a_run_are_those_of_its_start_wherever_they_lie(desk):
    def step(folder, number, text="weights"):
        place = layout.CHECKPOINTS.of(folder) / f"step-{number}"
        place.mkdir(parents=True)
        (place / "weights.distcp").write_text(text)
        (place / ".metadata").touch()
        layout.MANIFEST.of(place).write_text(json.dumps({"format": 1, "step": 1, "files": {}}))
        return place

    first = step(desk / "origin", 1)
    job = job_of(desk, "checkpoint.initial_load_path=origin")
    directory = begun(desk, job)
    step(desk / "origin", 2)
    assert inputs.initial_weights(directory, "origin") == first
    (desk / "origin").rename(desk / "moved")
    moved = layout.CHECKPOINTS.of(desk / "moved") / "step-1"
    assert inputs.initial_weights(directory, "moved") == moved
    with pytest.raises(ConfigError, match=r"checkpoint.initial_load_path=origin: .* is gone"):
        inputs.initial_weights(directory, "origin")
    (moved / "weights.distcp").write_text("others!")
    with pytest.raises(ConfigError, match=r"checkpoint.initial_load_path=moved: .* other bytes"):
        inputs.initial_weights(directory, "moved")
    environment = layout.ENV.read(directory)
    del environment["files"]  # a run from before files were recorded
    layout.ENV.write(directory, environment)
    assert inputs.initial_weights(directory, "moved").name == "step-2"
    layout.BASE.write(directory, {"folder": str(moved), "digest": "0"})
    assert inputs.initial_weights(directory, "moved") == moved


def test_rollouts_are_part_of_the_hash(desk):
    """The loop of reinforcement learning writes its rollouts under the same name in each cycle."""
    line = ("data=rollouts", "objective=policy", "data.path=rollouts.jsonl")
    (desk / "rollouts.jsonl").write_text("{}\n")
    first = identity(job_of(desk, *line))
    assert first == identity(job_of(desk, *line))
    (desk / "rollouts.jsonl").write_text("[]\n")
    assert identity(job_of(desk, *line)) != first


def test_only_files_that_the_source_reads_count(desk):
    (desk / "folder/deep").mkdir(parents=True)
    (desk / "folder/deep/a.txt").write_text("a")
    job = job_of(desk, "data=text_files", "data.path=folder")
    directory = begun(desk, job)
    (desk / "folder/notes.pdf").write_text("notes")
    (desk / "folder/.hidden.txt").write_text("hidden")
    assert not list(inputs.changes(job, directory, desk / "runs"))
    (desk / "folder/deep/b.txt").write_text("b")
    assert len(faults(job, directory)) == 1, "a further file is other data"


def test_large_files_are_sampled_and_a_later_time_is_said(desk, monkeypatch):
    monkeypatch.setattr(files_of_jobs, "WHOLE", 1000)
    monkeypatch.setattr(inputs, "WHOLE", 1000)
    (desk / "words.txt").write_bytes(bytes(10_000))
    os.utime("words.txt", (1e9, 1e9))
    job = job_of(desk, *KINDS["data"])
    directory = begun(desk, job)
    assert inputs.files_at_start(directory)["data.path"]["sampled"] and not list(
        inputs.changes(job, directory, desk / "runs")
    )
    with (desk / "words.txt").open("r+b") as file:
        file.seek(500)
        file.write(b"x")
    assert not faults(job, directory) and len(lines(job, directory)) == 1, "not among the bytes that are compared"
    for place in (0, 9_999):
        with (desk / "words.txt").open("r+b") as file:
            file.seek(place)
            file.write(b"x")
        assert len(faults(job, directory)) == 1


def test_many_files_are_read_once(desk, monkeypatch):
    """The table of an earlier run has the digests of files whose size, time and inode are the same."""
    (desk / "many").mkdir()
    for number in range(MANY + 5):
        (desk / f"many/{number}.txt").write_text(str(number))
        os.utime(f"many/{number}.txt", (1e9, 1e9))
    job = job_of(desk, "data=text_files", "data.path=many")
    directory = begun(desk, job)
    read = []
    original = files_of_jobs.digest_of_file
    monkeypatch.setattr(files_of_jobs, "digest_of_file", lambda *given: read.append(given) or original(*given))
    files_of_jobs._known.clear()
    look_anew()
    assert not list(inputs.changes(job, directory, desk / "runs")) and not read
    (desk / "many/7.txt").write_text("8")
    look_anew()
    assert len(faults(job, directory)) == 1 and [file.name for file, *_ in read] == ["7.txt"]
    assert files_of_jobs.look_at(Input("k", "data", "many")).whole == LITTLE


def test_a_table_counts_for_sets_of_its_side_of_many_only(desk, monkeypatch):
    """Of few files each is read as a whole, of many at most LITTLE bytes: a digest of the one is none of the other."""
    monkeypatch.setattr(files_of_jobs, "LITTLE", 1000)
    monkeypatch.setattr(inputs, "WHOLE", 100)
    (desk / "set").mkdir()

    def write(numbers):
        for number in numbers:
            (desk / f"set/{number}.txt").write_bytes(bytes(5_000))
            os.utime(f"set/{number}.txt", (1e9, 1e9))

    for first, second, name in ((range(MANY), range(MANY, MANY + 2), "grown"), (range(MANY + 2), (), "shrunk")):
        write(first)
        begun(desk, job_of(desk, "data=text_files", "data.path=set", "name=before"))
        write(second)
        for number in () if second else (0, 1, 2):
            (desk / f"set/{number}.txt").unlink()
        look_anew()
        job = job_of(desk, "data=text_files", "data.path=set", f"name={name}")
        directory = begun(desk, job)
        for table in layout.FILES.of(desk / "runs").iterdir():
            table.unlink()
        files_of_jobs._known.clear()
        look_anew()
        assert not list(inputs.changes(job, directory, desk / "runs")), "the table is gone, and no file has changed"
        look_anew()


def test_a_part_of_a_users_own_has_its_files_found(user_modules, desk):
    user_modules(
        {
            "rates_of_my_own.py": """
from dataclasses import dataclass
from titan_hydra.core.job.config.field import key
from titan_hydra.core.job.config.registry import LrScheduleKind, register
from titan_hydra.core.job.config.schema import LrSchedule

@dataclass
class Table(LrSchedule):
    table: str = key("words.txt", "file of rates", reads="schedule")

register(LrScheduleKind("table_of_rates", lambda step, steps, config: 1.0, Table))
"""
        }
    )
    job = job_of(desk, "train.imports=[rates_of_my_own]", "lr_scheduler.name=table_of_rates")
    assert [(one.key, one.word) for one in inputs_of(job)] == [("lr_scheduler.table", "schedule")]


def test_what_names_no_file_here_is_not_recorded(desk):
    assert look_at(Input("data.path", "data", "allenai/c4")) is None
    with contextlib.chdir(desk):
        assert (
            look_at(Input("data.path", "data", "words.txt")).digest == look_at(Input("x", "tasks", "other.txt")).digest
        )


@pytest.mark.parametrize("damage", ["file", "full", "entries", "digest", "gone", "folder"])
def test_the_tables_of_files_are_a_cache(desk, monkeypatch, damage):
    """A start that cannot write its table, or finds a damaged one, reads the files again."""
    (desk / "many").mkdir()
    for number in range(MANY + 1):
        (desk / f"many/{number}.txt").write_text(str(number))
        os.utime(f"many/{number}.txt", (1e9, 1e9))
    job, tables = job_of(desk, "data=text_files", "data.path=many"), layout.FILES.of(desk / "runs")
    if damage == "file":  # as on a file system that is read-only: no user can create a table
        (desk / "runs").mkdir()
        tables.touch()
    if damage == "full":

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(layout.FILES_TABLE.__class__, "write", _only(layout.FILES_TABLE, full))
    directory = begun(desk, job)
    tables_now = list(tables.iterdir()) if tables.is_dir() else []
    assert bool(tables_now) is (damage not in ("file", "full"))
    for table in tables_now:
        content = json.loads(table.read_text())
        for name, entry in list(content["entries"].items()):
            content["entries"][name] = {"entries": 5, "digest": [*entry[:3], "0" * 32]}.get(damage, entry)
        table.write_text(json.dumps(content))
        if damage in ("gone", "folder"):
            table.unlink()
        if damage == "folder":
            table.mkdir()
    files_of_jobs._known.clear()
    look_anew()
    assert not list(inputs.changes(job, directory, desk / "runs"))
    (desk / "many/7.txt").write_text("8")
    look_anew()
    assert len(faults(job, directory)) == 1


def _only(entry, function):
    """Return `Entry.write`, but for one entry another function."""
    original = layout.Entry.write
    return lambda self, *given: function(*given) if self is entry else original(self, *given)


def test_what_was_accepted_of_a_done_run_stays_accepted(desk, monkeypatch):
    job = job_of(desk, *KINDS["data"])
    directory = begun(desk, job)
    read = inputs.files_at_start(directory)

    def seen(text, done=True):
        (desk / "words.txt").write_text(text)
        look_anew()
        return inputs.check_files({directory: job}, desk / "runs", done={directory} if done else ())

    assert len(seen("other\n")) == 1
    job.launch.accept_changed = ["data"]
    for _ in range(2):
        inputs.accept_of_done(job, directory, desk / "runs")
    job.launch.accept_changed = []
    assert not seen("other\n") and len(seen("third\n")) == 1 and len(seen("other\n", done=False)) == 1
    assert inputs.files_at_start(directory) == read, "its result is that of the bytes that it has read"
    (accepted,) = layout.ENV.read(directory)["accepted"]
    assert accepted["attempt"] is None and accepted["was"] == read["data.path"]["digest"] != accepted["now"]


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"])
def test_what_lies_beside_a_tokenizer_belongs_to_it(desk, name):
    (desk / "tokenizer.json").write_text("{}")
    job = job_of(desk, "tokenizer=hf", "tokenizer.path=tokenizer.json")
    directory = begun(desk, job)
    (desk / "README.md").write_text("about")
    assert not list(inputs.changes(job, directory, desk / "runs"))
    for content in ("{}", "{ }"):  # a file that comes, and one that changes
        (desk / name).write_text(content)
        (fault,) = faults(job, directory)
        assert fault.key == "tokenizer.path" and "[tokenizer]" in fault.reason
        job.launch.accept_changed = ["tokenizer"]
        begun(desk, job)
        job.launch.accept_changed = []
        assert not list(inputs.changes(job, directory, desk / "runs"))
    (desk / "tokenizer.json").write_text("{ }")
    assert len(faults(job, directory)) == 1, "one fault names the key"


def test_only_weights_and_what_says_how_to_compute_with_them_count(desk):
    (desk / "hf").mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (desk / "hf" / name).write_text("{}")
    job = job_of(desk, "checkpoint.initial_load_path=hf")
    directory = begun(desk, job)
    (desk / "hf/onnx").mkdir()
    for name in ("README.json", "trainer_state.json", "chat_template.jinja", "tokenizer.json", "onnx/config.json"):
        (desk / "hf" / name).write_text("[]")
    assert not faults(job, directory) and inputs.initial_weights(directory, str(desk / "hf")) == desk / "hf"
    for name in ("config.json", "model.safetensors.index.json", "model-00002-of-00002.safetensors"):
        before = (desk / "hf" / name).read_text() if (desk / "hf" / name).exists() else None
        (desk / "hf" / name).write_text("[]")
        assert len(faults(job, directory)) == 1
        with pytest.raises(ConfigError, match="other bytes"):
            inputs.initial_weights(directory, str(desk / "hf"))
        (desk / "hf" / name).unlink() if before is None else (desk / "hf" / name).write_text(before)


@pytest.mark.parametrize("name", ["tokens.bin.json", "tokens.idx"])
def test_what_says_how_tokens_are_read_belongs_to_them(desk, name):
    (desk / "tokens.bin").write_bytes(bytes(4096))
    (desk / name).write_text("first")
    job = job_of(desk, "data=tokens", "data.path=tokens.bin")
    directory = begun(desk, job)
    assert not list(inputs.changes(job, directory, desk / "runs"))
    (desk / name).write_text("other")
    (fault,) = faults(job, directory)
    assert fault.key == "data.path" and "[data]" in fault.reason
