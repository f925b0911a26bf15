"""Every thread that works for a rank uses the rank's device. A thread that used device 0 instead would create a context
of half a GiB there.
"""

import threading

import pytest
import torch

from titan_hydra.core import data
from titan_hydra.core.checkpoint.checkpointer import Checkpointer
from titan_hydra.core.checkpoint.writer import Writer
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.train import trainer
from titan_hydra.core.train.observe import health

OWN = 3  # the device of this rank


@pytest.fixture
def device(monkeypatch):
    """Return a function `device()` that returns the current CUDA device of the calling thread, by torch's own rule but
    without CUDA.
    """
    current = threading.local()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: getattr(current, "device", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "device", device))
    torch.cuda.set_device(OWN)
    return torch.cuda.current_device


def test_threads_of_a_rank(device, tiny):
    seen = {}
    bare = threading.Thread(target=lambda: seen.update(bare=device()))
    bare.start()
    bare.join()
    health.run_within(5, "a question", lambda: seen.update(health=device()))
    loader = data.build(tiny("data.prefetch=1"), 0, 1)
    loader.collate, collate = lambda samples: (seen.update(data=device()), collate(samples))[1], loader.collate
    loader.next()
    loader.close()
    assert seen == {"bare": 0, "health": OWN, "data": OWN}


@pytest.mark.parametrize("name", ["sync", "async", "async_pinned"])
def test_threads_of_a_save(device, on_ranks, tiny, tmp_path, monkeypatch, name):
    seen, write = {}, Writer.write_data
    where = threading.current_thread
    monkeypatch.setattr(
        Writer, "write_data", lambda *given: (seen.update(write=(device(), where().name)), write(*given))[1]
    )

    def task(rank):
        torch.cuda.set_device(OWN)  # sets the device of this process's main thread
        job = tiny(f"checkpoint={name}")
        built, loader = trainer.build(job, torch.device("cpu")), data.build(job, 0, 1)
        checkpointer = Checkpointer(job.checkpoint, Run(tmp_path, tmp_path, 0, 0, 1), built.model, built.optimizers)
        if checkpointer.stager:
            stage, checkpointer.stager._stage = (
                checkpointer.stager._stage,
                lambda *given: (seen.update(stage=device()), stage(*given))[1],
            )
        checkpointer.save(1, loader.state())
        checkpointer.finish_pending()
        checkpointer.close()
        assert seen["write"][0] == OWN and ("Executor" in seen["write"][1]) == (name != "sync")
        assert seen.get("stage") == (None if name == "sync" else OWN)

    on_ranks(1, task)
