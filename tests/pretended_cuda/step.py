"""Run a step of layouts on the pretended device: `python -m tests.pretended_cuda.step GUARD OUT layouts|matrix|planted
[NAME ...]`.

Writes the records of all ranks to OUT as JSON. It needs a process of its own, as it loads the library GUARD before torch,
and changes torch for the rest of the process.
"""

import json
import sys
import time
import traceback
from contextlib import contextmanager, nullcontext
from pathlib import Path

from tests.pretended_cuda.layouts import LAYOUTS, Layout, of_matrix


def step(chosen: Layout, rank: int, records: dict) -> None:
    """Run a step of one rank, and put its record into `records`."""
    import torch
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    from tests.pretended_cuda.record import Recorder
    from titan_hydra.core.train.fake import fake_step, fake_world
    from titan_hydra.experiments.compose.compose import compose_job

    job = compose_job(*chosen.overrides)
    job.comm.rank = rank

    @contextmanager
    def watch(trainer, batch):
        if job.optimizer.offload:  # the states that a resumed run has
            for optimizer in trainer.optimizers:
                _init_optim_state(optimizer)
        update = trainer.update
        trainer.update = lambda agreement: (update(agreement), agreement.read())  # as the training loop does
        names = {module: name for name, module in trainer.model.named_modules()}
        with Recorder(names, chosen.reads) as recorder, torch.autograd.set_multithreading_enabled(False):
            records[rank] = recorder.record
            yield
        recorder.state([*trainer.model.parameters(), *trainer.model.buffers()])

    forget_meshes()
    with fake_world(job):
        fake_step(job, watch, torch.device("cuda", 0))


def forget_meshes() -> None:
    """Clear DTensor's cache, which would take another rank's mesh for this rank's: the two compare as equal but have
    other groups.
    """
    from torch.distributed.tensor import DTensor, debug

    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache.cache_clear()
    getattr(debug, "_clear_fast_path_sharding_prop_cache", lambda: None)()


def all_ranks(chosen: Layout) -> dict:
    """Return the records of all ranks of a layout, computed one after the other, and the error if there was one."""
    records, error = {}, None
    try:
        for rank in range(chosen.ranks):
            step(chosen, rank, records)
    except Exception:
        error = traceback.format_exc()
    return {"error": error, "ranks": records}


def main(guard: str, out: str, kind: str, *names: str) -> None:
    """Make a step of the layouts of one kind: those named in `names`, or all."""
    from tests.pretended_cuda import device

    device.pretend(Path(guard))
    from tests.pretended_cuda import attention, planted

    attention.choose_kernels()
    results, plants = {}, planted.PLANTED if kind == "planted" else {}
    layouts = {"layouts": LAYOUTS, "planted": {name: plant.layout for name, plant in plants.items()}}.get(
        kind
    ) or of_matrix()
    for name in names or layouts:
        began = time.perf_counter()
        with plants[name].put() if plants else nullcontext():
            results[name] = all_ranks(layouts[name])
        print(f"{name}: {time.perf_counter() - began:.1f} s", (results[name]["error"] or "")[-1000:], flush=True)
        Path(out).write_text(
            json.dumps(results, default=lambda value: sorted(value) if isinstance(value, set) else vars(value))
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
