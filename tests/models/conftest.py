"""What the tests of models share: small configs, and a few ranks on this machine."""
import os
import time
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from titan_hydra.config.schema import Model, RopeScaling


@pytest.fixture
def tiny():
    """A function that makes a small model's config: 4 query heads of 16 share 2 key/value heads."""

    def make(factor=1.0, **changes):
        values = {"name": "tiny", "vocab_size": 99, "dim": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "multiple_of": 32,
                  "rope_scaling": RopeScaling(factor=factor, original_max_seq_len=32)}
        return Model(**values | changes)

    return make


@pytest.fixture
def on_ranks(tmp_path):
    """A function that runs `task(rank)` in `world` forked processes over gloo and fails with the first traceback."""

    def run(world, task):
        context = mp.get_context("fork")
        processes = [context.Process(target=_rank, args=(rank, world, task, tmp_path)) for rank in range(world)]
        for process in processes:
            process.start()
        deadline = time.monotonic() + 120
        while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in processes:
            process.kill()  # the peers of one that failed would wait for it; those that ended do not mind
            process.join()
        errors = [path.read_text() for path in sorted(tmp_path.glob("error*"))]
        assert not errors, errors[0]
        assert all(p.exitcode == 0 for p in processes), [p.exitcode for p in processes]

    return run


def _rank(rank, world, task, folder):
    torch.set_num_threads(1)
    status = 1
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        task(rank)
        dist.barrier()
        status = 0
    except BaseException:
        (folder / f"error{rank}").write_text(traceback.format_exc())
    os._exit(status)
