"""Define the checks of gpu_cases.py for ranks that have joined a process group, and those that fail on purpose. See
gpu_checks.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist
from gpu_cases import base_of
from gpu_checks import Here

from titan_hydra.core.base.errors import Unhealthy
from titan_hydra.core.train.observe import flight, health
from titan_hydra.instruments.verify import verify
from titan_hydra.instruments.verify.case import Case as Layout

# For a dry run. Bfloat16 is slow on many CPUs.
SMALLER = {
    "data.seq_len=256": "data.seq_len=64",
    "data.seq_len=264": "data.seq_len=24",
    "model.dim=256": "model.dim=64",
    "model.head_dim=64": "model.head_dim=16",
    "model.vocab_size=4096": "model.n_layers=2",
}


def adapted(here: Here, layout: Layout) -> Layout:
    """Return the layout as this device can run it, made smaller in a dry run."""
    base, overrides = layout.base, layout.overrides
    if not here.gpu:
        base, overrides = (
            tuple(word.replace("model.attention=efficient", "model.attention=math") for word in words)
            for words in (base, overrides)
        )
    if not here.gpu and any(override.startswith("precision=float8") for override in base):
        base = (*base, "precision.emulate=true")
    if not here.gpu and {"compile=block", "compile=model"} & {*overrides}:
        overrides = (*overrides, "compile.backend=aot_eager")
    if here.dry:
        base = (*base, *(SMALLER[override] for override in base if override in SMALLER))
    return dataclasses.replace(layout, base=base, overrides=overrides)


def key(layout: Layout) -> str:
    """Return the name of the file of a layout's reference."""
    return hashlib.sha256(repr(base_of(layout)).encode()).hexdigest()[:16]


def steps(here: Here) -> int:
    return 2 if here.dry else 4


def reference(here: Here, layout: Layout) -> dict[str, Any]:
    """Run one process with the same configuration as the layout, and keep its results for `agrees`."""
    layout = adapted(here, layout)
    found = verify.trace(verify.reference_of(layout, steps(here)), here.device, layout)
    torch.save(dataclasses.asdict(found), here.shared / f"{key(layout)}.pt")
    return {"loss": found.losses[-1]}


def agrees(here: Here, layout: Layout) -> dict[str, Any]:
    """A layout agrees with one process in losses, norms, gradients and weights. Its initial weights have the same bits,
    and copies of a weight stay equal.
    """
    layout = adapted(here, layout)
    found = verify.trace(verify.job_of(layout, steps(here)), here.device, layout)
    if here.rank:
        return {}
    file = here.shared / f"{key(layout)}.pt"
    assert file.exists(), "the reference did not run"
    outcome = verify.compare(layout, found, verify.Trace(**torch.load(file)))
    facts = {name: getattr(outcome, name) for name in ("loss", "norm", "gradients", "weights")}
    assert outcome.passed, str(outcome)
    return facts


def records(here: Here) -> dict[str, Any]:
    """The flight recorder sees the collectives of this device: they count as progress, and they are in the dump."""
    before = flight.progress()
    dist.all_reduce(torch.ones(1000, device=here.device))
    if here.gpu:
        torch.cuda.synchronize()
    deadline = time.monotonic() + 5
    while flight.progress() == before and time.monotonic() < deadline:
        time.sleep(0.1)
    assert flight.progress() != before, "no progress was seen"
    last = [entry for entry in flight.collectives() if "reduce" in entry["op"]][-1]
    assert last["backend"] == ("nccl" if here.gpu else "gloo") and last["group"] in flight.groups_of_rank(None), last
    return {"backend": last["backend"]}


def taken(here: Here) -> dict[str, Any]:
    """The health check refuses a device whose memory another process holds, and accepts it when this memory is free
    again.
    """
    capacity = torch.cuda.get_device_properties(here.device).total_memory
    held = torch.empty(int(0.15 * capacity), dtype=torch.uint8, device=here.device) if here.rank else None
    dist.barrier()
    if here.rank == 0:
        try:
            health.wait_until_free(here.device, 0)
        except Unhealthy as error:
            assert "taken by other processes" in str(error)
        else:
            raise AssertionError("a taken device was called free")
    dist.barrier()
    del held
    torch.cuda.empty_cache()
    dist.barrier()
    health.wait_until_free(here.device, 5)
    return {}


# --- what the kit itself is tested with -------------------------------------------------------------------------------


def nothing(here: Here) -> dict[str, Any]:
    return {}


def hangs(here: Here) -> dict[str, Any]:
    time.sleep(1e6)
    return {}


def raises(here: Here) -> dict[str, Any]:
    raise ValueError("planted")


def dies(here: Here) -> dict[str, Any]:
    if here.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return {}
