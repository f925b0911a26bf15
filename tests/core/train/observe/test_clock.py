"""On a device that works behind the host, as CUDA does, the time of a step has the whole step in it, and nothing else."""

import contextlib
import json
import multiprocessing
import time
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from titan_hydra.core.checkpoint import checkpointer
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train import loop, step, trainer
from titan_hydra.core.train.loop import train
from titan_hydra.core.train.observe import metrics, profiling, stragglers

STEPS, ROW, COLLECTION, VALIDATION, SAVE, COPY = 11, 0.25, 0.125, 3.0, 4.0, 5.0


class Queue:
    """A device on which forward and backward take 1.5 s and the update 0.5 s, in a time of its own: the host only puts
    work into the queue, and its time passes where it waits for the device, or does one of the things named above.
    """

    def __init__(self) -> None:
        self.now = self.until = 0.0  # the host's time, and the time at which the device has done everything

    def put(self, seconds: float) -> None:
        self.until = max(self.until, self.now) + seconds

    def wait(self, moment: float | None = None) -> None:
        self.now = max(self.now, self.until if moment is None else moment)

    def spend(self, seconds: float) -> None:
        self.now += seconds

    @contextlib.contextmanager
    def behind(self) -> Iterator[None]:
        """Let the training loop run on this device while the block runs."""
        clock = SimpleNamespace(
            perf_counter=lambda: self.now, time=lambda: self.now, monotonic=lambda: self.now, strftime=time.strftime
        )
        with contextlib.ExitStack() as patches:

            def follow(owner, name, after):
                method = getattr(owner, name)

                def followed(*given, **named):
                    result = method(*given, **named)
                    after(result, *given)
                    return result

                patches.enter_context(mock.patch.object(owner, name, followed))

            def precede(owner, name, before):
                method = getattr(owner, name)
                patches.enter_context(
                    mock.patch.object(owner, name, lambda *given, **named: (before(*given), method(*given, **named))[1])
                )

            for module in (metrics, loop, checkpointer, profiling):
                patches.enter_context(mock.patch.object(module, "time", clock))
            follow(trainer.Trainer, "forward_backward", lambda *_: self.put(1.5))
            follow(trainer.Trainer, "update", lambda *_: self.put(0.5))
            follow(trainer.Trainer, "agree", lambda agreed, *_: setattr(agreed, "moment", self.until))
            precede(step.Agreement, "read", lambda agreed: self.wait(agreed.moment))
            precede(metrics.Metrics, "_memory", lambda _: self.wait())
            precede(stragglers.OnHost, "wait", lambda _: self.wait())
            precede(metrics.Rows, "add", lambda *_: self.spend(ROW))
            # what a validation queues, and its wait for the loss; what a save copies after the update
            precede(trainer.Trainer, "validate", lambda *_: (self.put(VALIDATION), self.wait()))
            follow(loop, "collect_garbage", lambda _, step, every: self.spend(COLLECTION * (step % every == 0)))
            start = checkpointer.Checkpointer._start

            def started(saver, pending, content):
                start(saver, pending, content)
                self.wait()
                if saver.stager is None:
                    self.spend(SAVE)
                else:  # the copy runs beside the next step
                    pending.staged = SimpleNamespace(result=lambda done=self.now + COPY: self.wait(done))

            patches.enter_context(mock.patch.object(checkpointer.Checkpointer, "_start", started))
            yield


@pytest.fixture
def queued(tiny, tmp_path):
    """Return `queued(*overrides)`, which trains a job on such a device and returns its rows, events and result."""

    def run(*overrides):
        job = tiny(f"steps={STEPS}", "checkpoint=off", "train.gc_interval=4", *overrides)
        (tmp_path / "attempts/1").mkdir(parents=True)
        (tmp_path / "config.json").write_text("{}")

        def rank():
            store = dist.FileStore(str(tmp_path / "store"), 1)
            with Queue().behind():
                train(job, Run(tmp_path, tmp_path / "attempts/1", store=store))

        process = multiprocessing.get_context("fork").Process(target=rank)
        process.start()
        process.join(100)
        assert process.exitcode == 0
        rows, events = (
            [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
            for name in ("metrics", "events")
        )
        return rows, events, json.loads((tmp_path / "result.json").read_text())

    return run


@pytest.mark.parametrize("every", [1, 2, 5])
def test_a_steps_time_has_its_update_in_it(queued, every):
    rows, _, result = queued(f"metrics.log_every={every}", "train.gc_interval=1000")
    assert [row["step_seconds"] for row in rows[1:]] == [2.0] * (len(rows) - 1)
    assert rows[0]["step_seconds"] == 1.5, "the update of the first step is in the second step's time"
    assert result["tokens"] / result["steps"] / result["tokens_per_second"] == 2.0
    assert result["tokens_per_second_iqr"] == 0.0


def test_all_time_is_in_a_step_or_left_out_by_name(queued):
    """The seconds of all steps and of everything that is left out are those of the run."""
    line = ("checkpoint=sync", "checkpoint.interval=5", "validation=on", "validation.interval=3", "validation.steps=1")
    rows, events, result = queued("metrics.log_every=2", *line)
    assert [row["step"] for row in rows] == [1, 2, 4, 6, 8, 10, 11]
    counts = [row["step"] - before for row, before in zip(rows, [0, *(row["step"] for row in rows)], strict=False)]
    steps = sum(count * row["step_seconds"] for count, row in zip(counts, rows, strict=True))
    assert steps == 2.0 * STEPS - 0.5 + 2 * COLLECTION, "the last update is in no step, two collections are"
    validations, saves = (
        [event for event in events if event["event"] == name] for name in ("validation", "checkpoint")
    )
    assert [event["seconds"] for event in validations] == [VALIDATION] * 4, "without the update before"
    assert [event["seconds_held"] for event in saves] == [SAVE] * 3, "without the update before"
    left_out = 4 * VALIDATION + 3 * SAVE + ROW * (len(rows) + len(events))
    assert COLLECTION + steps + left_out + 0.5 == result["seconds"], "the first collection is before the first step"


@pytest.mark.parametrize("copy", [1.0, 5.0])
def test_only_a_wait_for_the_copy_that_is_longer_than_the_gradients_is_left_out(queued, monkeypatch, copy):
    """With checkpoint=async, weights are copied while the device computes the next step's gradients (1.5 s)."""
    monkeypatch.setitem(globals(), "COPY", copy)
    rows, events, _ = queued(
        "metrics.log_every=1", "train.gc_interval=1000", "checkpoint=async", "checkpoint.interval=4"
    )
    assert [row["step_seconds"] for row in rows[1:]] == [2.0] * (STEPS - 1)
    held = [event["seconds_held"] for event in events if event["step"] < STEPS]
    assert held == [max(0.0, copy - 1.5)] * 2
