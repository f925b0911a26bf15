"""What all tests share: a few ranks on this machine, one thread a process, since they run on few cores, and no network."""
import multiprocessing as mp
import os
import time
import traceback

import pytest

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["WANDB_MODE"] = "offline"


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
    import torch
    import torch.distributed as dist

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
