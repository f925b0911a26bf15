"""Test a checkpoint on disk: its checksums, names and checks; when it is kept or deleted; how it is written while
training continues, and written again if a write fails.
"""

import json
import os
import re
import shutil
import time
import weakref
from pathlib import Path

import pytest
import torch

from titan_hydra.core import data
from titan_hydra.core.base.errors import CheckpointError
from titan_hydra.core.checkpoint import planner, safe
from titan_hydra.core.checkpoint.checkpointer import Checkpointer
from titan_hydra.core.checkpoint.writer import Writer
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.kernels import split_masters
from titan_hydra.core.parallel.split_masters import master_of
from titan_hydra.core.train import trainer
from titan_hydra.core.train.step import Agreement

from .steps import cut_back

NOTHING = Agreement(torch.ones(()), torch.zeros(2, dtype=torch.float64))  # for a step whose gradient is given
DAMAGES = {
    "cut short": (lambda file: os.truncate(file, file.stat().st_size // 2), "bytes instead of"),
    "a bit flipped": (lambda file: flip(file), "does not match its checksum"),
    "removed": (lambda file: file.unlink(), "missing"),
}


def flip(file: Path) -> None:
    """Flip one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    """Return a finished run of two ranks with checkpoints of steps 2, 4 and 6, and its job."""
    from titan_hydra.experiments.compose.compose import compose_job

    job = compose_job(
        "debug=tiny",
        "precision=fp32",
        "metrics.log_every=1",
        "parallelism=fsdp",
        "gpus=2",
        "steps=6",
        "checkpoint.interval=2",
        "checkpoint.keep_latest_k=0",
    )
    return job, tmp_path_factory.mktemp("run") / "run"


@pytest.fixture
def cut(a_run, run_job, tmp_path):
    """Return a copy of the run as it was before its last two steps, with checkpoints of steps 2 and 4."""
    job, whole = a_run
    if not whole.exists():
        run_job(job, whole)
    return job, whole, cut_back(whole, 4, tmp_path / "copy")


@pytest.mark.parametrize("name", [".metadata", "__1_0.distcp", "rank_00001.json"])
@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_named(cut, name, kind):
    step = cut[2] / "checkpoints/step-00000004"
    assert checkpoints.damage(step) == []
    harm, words = DAMAGES[kind]
    harm(step / name)
    (problem,) = checkpoints.damage(step)
    assert name in problem and words in problem
    assert sorted(checkpoints.damage(step, 0, 2) + checkpoints.damage(step, 1, 2)) == [problem], (
        "the ranks together must see all, once"
    )


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_manifest_is_no_manifest(cut, kind):
    step = cut[2] / "checkpoints/step-00000004"
    DAMAGES[kind][0](step / layout.MANIFEST.name)
    assert checkpoints.damage(step), "whatever bit it was, something no longer agrees"


def test_a_damaged_step_is_left_out_and_an_older_one_taken(cut, run_job):
    job, whole, copy = cut
    flip(copy / "checkpoints/step-00000004/__1_0.distcp")
    aside = copy / "checkpoints/step-00000004.damaged"
    aside.mkdir()
    (aside / "of an earlier time").touch()
    run_job(job, copy)
    assert run_job.losses(copy) == run_job.losses(whole)
    names = [path.name for path in sorted((copy / "checkpoints").iterdir())]
    assert names == ["step-00000002", "step-00000004", "step-00000004.damaged", "step-00000006"]
    assert not any(checkpoints.damage(path) for path in checkpoints.complete(copy / "checkpoints"))


def test_a_step_under_another_name_is_damaged_and_garbage_in_the_rows_is_left_out(cut, run_job):
    """A restore or a wrong mv has renamed step 4 to step 6, or a crashed file system has left garbage in a log."""
    job, whole, copy = cut
    (copy / "checkpoints/step-00000004").rename(copy / "checkpoints/step-00000006")
    assert checkpoints.damage(copy / "checkpoints/step-00000006") == ["manifest.json is that of step 4"]
    step = copy / "checkpoints/step-00000002"
    shutil.copy(step / "rank_00001.json", step / "rank_00001.bak.json")
    file = copy / "metrics.jsonl"
    first, *rest = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(
        b"".join([first, b"\xff\x00\xfe" * 40 + b"\n", b"[2]\n", b'{"step": null}\n', *rest, b'{"step": 7, "lo'])
    )
    run_job(job, copy)
    assert run_job.losses(copy) == run_job.losses(whole) and len(run_job.rows(copy)) == 6
    log = (copy / "attempts/2/rank_0.log").read_text()
    assert "metrics.jsonl: 3 lines left out that cannot be read" in log, log
    assert (copy / "checkpoints/step-00000006.damaged").exists()


def test_a_run_with_only_damaged_steps_does_not_begin_again(cut, run_job):
    job, _, copy = cut
    for number in (2, 4):
        (copy / f"checkpoints/step-0000000{number}/.metadata").unlink()
    for attempt in (2, 3):
        run_job(job, copy, expect=1)
        message = (copy / f"attempts/{attempt}/error_0").read_text()
        assert "step-00000004: .metadata is missing; step-00000002" in message and "launch.force=true" in message
    for path in checkpoints.complete(copy / "checkpoints"):
        path.rename(path.with_name(f"{path.name}.damaged"))
    run_job(job, copy, expect=1)


def test_saving_in_the_background_saves_the_same(cut, run_job, tiny, tmp_path):
    whole = cut[1]
    other = run_job(
        tiny(
            "parallelism=fsdp",
            "gpus=2",
            "steps=6",
            "checkpoint=async",
            "checkpoint.interval=2",
            "checkpoint.keep_latest_k=0",
        )
    )
    assert run_job.losses(other) == run_job.losses(whole)
    for step in checkpoints.complete(whole / "checkpoints"):
        assert checkpoints.damage(other / "checkpoints" / step.name) == []
        for shard in step.glob("*.distcp"):
            assert shard.read_bytes() == (other / "checkpoints" / step.name / shard.name).read_bytes()
    events = [row for row in run_job.rows(other, "events") if row["event"] == "checkpoint"]
    assert [row["step"] for row in events] == [2, 4, 6]
    assert all(0 < row["seconds_held"] <= row["seconds"] for row in events[:2])


def test_every_byte_is_on_the_disk_before_a_step_has_its_name(alone, monkeypatch):
    """torch syncs `.metadata` before all of its bytes have left the buffer."""
    synced, fsync = {}, os.fsync

    def noted(number):
        synced[Path(os.readlink(f"/proc/self/fd/{number}")).name.removesuffix(".tmp")] = os.fstat(number).st_size
        fsync(number)

    def task(built, checkpointer, data_state, events):
        monkeypatch.setattr(os, "fsync", noted)
        checkpointer.after_step(5, checkpointer.votes(), data_state, last=False, stop=False)
        files = {file.name: file.stat().st_size for file in (checkpointer.folder / "step-00000005").iterdir()}
        assert {".metadata", "__0_0.distcp", layout.MANIFEST.name} <= files.keys()
        assert {name: synced.get(name) for name in files} == files

    alone(task, "checkpoint=sync", "checkpoint.interval=5")


@pytest.fixture
def alone(on_ranks, tiny, tmp_path):
    """Return `alone(task, *overrides)`, which calls task(trainer, checkpointer, loader, events) in a process of one
    rank.
    """

    def run(task, *overrides):
        job = tiny("steps=20", "checkpoint.keep_latest_k=0", *overrides)

        def rank(number):
            built = trainer.build(job, torch.device("cpu"))
            events = []
            checkpointer = Checkpointer(job.checkpoint, Run(tmp_path, tmp_path, 0, 0, 1), built.model, built.optimizers)
            checkpointer.report = lambda event, step, **values: events.append((event, step, values))
            loader = data.build(job, 0, 1)
            built.forward_backward(loader.next())
            task(built, checkpointer, loader.state(), events)
            loader.close()

        on_ranks(1, rank)

    return run


@pytest.mark.parametrize("name", ["async", "async_pinned"])
def test_the_optimizer_waits_for_the_copy(alone, monkeypatch, tmp_path, name):
    def task(built, checkpointer, state, events):
        stage = checkpointer.stager._stage
        checkpointer.stager._stage = lambda *given: (time.sleep(0.5), stage(*given))[1]
        before = {name: p.detach().clone() for name, p in built.model.named_parameters()}
        began = time.perf_counter()
        checkpointer.save(1, state)
        assert time.perf_counter() - began < 0.4, "the copy is not overlapped"
        assert checkpointer.wait_for_staging() > 0.1
        built.update(NOTHING)
        checkpointer.after_step(2, [0.0, 0.0], state, last=True, stop=False)
        checkpointer.start_from(str(tmp_path / "checkpoints/step-00000001"), built.job.model)
        assert all(torch.equal(before[name], p.detach()) for name, p in built.model.named_parameters())
        assert [event[:2] for event in events] == [("checkpoint", 1), ("checkpoint", 2)]

    alone(task, f"checkpoint={name}")


@pytest.mark.parametrize("name", ["sync", "async", "async_pinned"])
def test_a_save_of_split_masters_joins_one_at_a_time(alone, monkeypatch, tmp_path, name):
    """The tensors that DCP gets are in the weights' own memory. Of the joined tensors at most two exist at a time, the
    last one and the next.
    """
    joined, alive, most = [], weakref.WeakSet(), []

    def join(*halves):
        alive.add(whole := split_masters.join(*halves))
        joined.append(whole.nbytes)
        most.append(len(alive))
        return whole

    def saved(path, like):
        content = {"model": {name: torch.zeros(weight.shape, dtype=like) for name, weight in whole.items()}}
        safe.load_checkpoint(content, path)
        return content["model"]

    def task(built, checkpointer, data_state, events):
        nonlocal whole
        built.update(built.agree(torch.zeros(()), built.measure()))
        parameters = dict(built.model.named_parameters())
        whole = {name: master_of(parameter) for name, parameter in parameters.items()}
        own = {part.data_ptr() for parameter in parameters.values() for part in (parameter, parameter.lower_half)}
        content = checkpointer._content({"model"}, built.model)
        assert {tensor.data_ptr() for part in content.values() for tensor in part.values()} == own
        monkeypatch.setattr(planner, "join", join)
        checkpointer.after_step(1, [0.0, 0.0], data_state, last=False, stop=True)
        checkpointer.save_weights(tmp_path / "export", {"model": built.job.model}, "bfloat16")
        assert len(joined) == 2 * len(whole) and max(most) <= 2
        step = checkpointer.folder / "step-00000001"
        for path, dtype in ((step, torch.float32), (tmp_path / "export", torch.bfloat16)):
            entry = safe.read_index(path).state_dict_metadata
            assert {entry[f"model.{name}"].properties.dtype for name in whole} == {dtype}
            assert all(torch.equal(weight, whole[name].to(dtype)) for name, weight in saved(path, dtype).items())
        for parameter in parameters.values():
            parameter.data.zero_()
            parameter.lower_half.zero_()
        checkpointer.resume()
        assert all(torch.equal(master_of(parameter), whole[name]) for name, parameter in parameters.items())

    whole = {}
    alone(task, "precision=bf16", "optimizer.masters=split", f"checkpoint={name}")


def test_every_save_is_copied_into_the_same_memory(alone, monkeypatch):
    """As in torch 2.11, the stager closes its inner stager after each copy."""

    def task(built, checkpointer, data_state, events):
        stager, copies = checkpointer.stager, []
        stage = stager._stage

        def noted(content):
            copies.append(stage(content))
            stager._state_dict_stager.close()
            return copies[-1]

        monkeypatch.setattr(stager, "_stage", noted)
        for step in (1, 2):
            checkpointer.after_step(step, [0.0, 0.0], data_state, last=False, stop=True)
        assert [event[:2] for event in events] == [("checkpoint", 1), ("checkpoint", 2)]
        first, second = (
            {name: tensor.data_ptr() for part in ("model", "lower_halves") for name, tensor in copy[part].items()}
            for copy in copies
        )
        assert first == second

    alone(task, "checkpoint=async_pinned", "precision=bf16", "optimizer.masters=split")


def steps(checkpointer, state, numbers, stop_at=None):
    for step in numbers:
        checkpointer.wait_for_staging()
        if checkpointer.pending:
            checkpointer.pending.written.exception()
        checkpointer.after_step(step, checkpointer.votes(), state, last=step == 20, stop=step == stop_at)


@pytest.mark.parametrize("name", ["sync", "async"])
def test_a_failing_save_is_tried_again_and_two_that_were_due_end_the_run(alone, monkeypatch, name):
    broken, plan = [], Writer.prepare_global_plan

    def prepare(self, plans):
        if broken:
            raise OSError(broken.pop())
        return plan(self, plans)

    monkeypatch.setattr(Writer, "prepare_global_plan", prepare)

    def task(built, checkpointer, state, events):
        def tried():
            return [event[0].removeprefix("checkpoint_") + f" {event[1]}" for event in events]

        broken.extend(["disk on fire"] * 3)
        steps(checkpointer, state, range(1, 18))
        assert tried() == ["failed 5", "failed 6", "failed 10", "checkpoint 11", "checkpoint 15"]
        assert events[0][2]["reason"] == "rank 0: disk on fire"
        assert not list(checkpointer.folder.glob("*.writing"))
        events.clear()
        broken.extend(["disk on fire"] * 4)
        with pytest.raises(CheckpointError, match=r"step 20.*disk on fire; the newest complete one is step-00000015"):
            steps(checkpointer, state, range(18, 21))
        assert tried() == ["failed 20", "failed 20"]

    alone(task, f"checkpoint={name}", "checkpoint.interval=5")


@pytest.mark.parametrize("name", ["sync", "async"])
def test_the_first_save_of_a_process_is_read_back(alone, monkeypatch, name):
    """On Python 3.11.2 no checkpoint could be read, and a run noticed this only when it had to resume."""
    read, check = [], safe.check_readable

    def task(built, checkpointer, state, events):
        monkeypatch.setattr(safe, "check_readable", lambda path: (read.append(path.name), check(path)))
        steps(checkpointer, state, range(1, 13))
        assert read == ["step-00000005.writing"] and checkpointer.saved == 10
        checkpointer.read_back = False
        monkeypatch.setattr(
            safe, "CLASSES", {key: kind for key, kind in safe.CLASSES.items() if kind is not safe.StorageInfo}
        )
        with pytest.raises(
            CheckpointError,
            match=r"step 15 could not be written.*could run code.*newest complete one is step-00000010$",
        ):
            steps(checkpointer, state, range(13, 17))
        assert not list(checkpointer.folder.glob("*15*"))

    alone(task, f"checkpoint={name}", "checkpoint.interval=5")


def test_four_failures_in_a_row_end_the_run(alone, monkeypatch):
    def fail(self, plans):
        raise OSError("disk on fire")

    def task(built, checkpointer, state, events):
        monkeypatch.setattr(Writer, "prepare_global_plan", fail)
        with pytest.raises(CheckpointError, match="4 tries in a row"):
            steps(checkpointer, state, range(1, 20))
        assert [event[1] for event in events] == [5, 6, 10, 11]

    alone(task, "checkpoint=sync", "checkpoint.interval=5")


def test_room_is_asked_for_before_the_first_byte(alone, monkeypatch):
    def task(built, checkpointer, state, events):
        monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**5, 10**5))
        checkpointer.save(1, state)
        ((name, _, values),) = events
        assert name == "checkpoint_failed"
        assert re.search(r"No space left on device: it needs [\d.]+ MiB and 0\.10 are free", values["reason"])

    alone(task)


def test_when_a_save_is_due(alone):
    def task(built, checkpointer, state, events):
        steps(checkpointer, state, range(1, 5))
        checkpointer.clock -= 120
        assert checkpointer.votes() == [1.0, 0.0]
        steps(checkpointer, state, range(5, 8))
        steps(checkpointer, state, [19, 20])
        assert [event[1] for event in events] == [1, 5]
        assert checkpointer.votes() == [0.0, 0.0]

    alone(
        task,
        "checkpoint.interval=0",
        "checkpoint.interval_minutes=2",
        "checkpoint.first_step=true",
        "checkpoint.last_step=false",
    )


def test_a_stop_is_always_saved(alone):
    def task(built, checkpointer, state, events):
        steps(checkpointer, state, [7], stop_at=7)
        assert checkpoints.newest(checkpointer.folder).name == "step-00000007" and not checkpointer.pending

    alone(
        task,
        "checkpoint=async",
        "checkpoint.interval=0",
        "checkpoint.interval_minutes=100",
        "checkpoint.last_step=false",
    )


def test_what_is_kept(tmp_path):
    for step in range(100, 1100, 100):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / "step-00001100.damaged").mkdir()

    def kept(*rule):
        return [
            checkpoints.step_of(path)
            for path in checkpoints.complete(tmp_path)
            if path not in checkpoints.surplus(tmp_path, *rule)
        ]

    assert kept(2, 0) == [900, 1000]
    assert kept(1, 500) == [500, 1000]
    assert kept(0, 0) == list(range(100, 1100, 100))
    for step, loss in ((300, 2.5), (400, 2.0), (600, 2.0), (700, None), (1000, 2.25)):
        checkpoints.write_manifest(checkpoints.step_folder(tmp_path, step), step, 1, {"file": (1, 1)}, loss)
    assert kept(2, 0, True) == [400, 900, 1000] and kept(2, 0) == [900, 1000]
    assert kept(8, 0, True) == list(range(300, 1100, 100)), "the best is among the newest"
    waste = checkpoints.Bin()
    waste.throw(checkpoints.surplus(tmp_path, 2, 0))
    assert kept(0, 0) == [900, 1000], "out of sight at once"
    waste.wait()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000900",
        "step-00001000",
        "step-00001100.damaged",
    ]


def test_the_manifest_sums_every_file(cut):
    step = cut[1] / "checkpoints/step-00000006"
    manifest = json.loads((step / layout.MANIFEST.name).read_text())
    assert manifest["step"] == 6 and manifest["world_size"] == 2
    assert {*manifest["files"], layout.MANIFEST.name} == {path.name for path in step.iterdir()}
