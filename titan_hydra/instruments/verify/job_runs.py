"""What a proof of a layout runs: jobs of reduced size against one process, the order of their samples, a run that is
killed and resumed, an export that is imported.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from titan_hydra.core import data
from titan_hydra.core.base.errors import ConfigError, RunError
from titan_hydra.core.checkpoint import convert
from titan_hydra.core.checkpoint.folder import Folder
from titan_hydra.core.checkpoint.reader import PREFIX, Reader
from titan_hydra.core.job.config import Job
from titan_hydra.core.job.config.operation import Checkpoint, Launch, Paths
from titan_hydra.core.job.ranks import data_parallel
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.core.models.hf import hf_of, meta_state
from titan_hydra.experiments.launch import dispatch
from titan_hydra.experiments.launch.cell import Cell
from titan_hydra.experiments.runs import rundir

from .judge import Outcome
from .reduce import JobPair, with_own_data
from .verify import prove, reference_key

# steps of a run (so many that the kill comes before the end), and steps between two checkpoints
STEPS, INTERVAL = 24, 4
STEPS_OF_DATA = 3  # number of steps whose samples are compared
TRIES = 3  # maximum number of runs that are started, until one of them is killed before its end


def compared(pairs: Iterable[JobPair]) -> list[Outcome]:
    """Compare the two jobs of each pair; equal references run once. Returns an outcome for each pair, in their order."""
    all_pairs = list(pairs)
    references = {reference_key(pair.case): (pair.case, pair.alone) for pair in reversed(all_pairs)}
    return prove([pair.case for pair in all_pairs], [pair.job for pair in all_pairs], references)


def order_of_data(job: Job, small: Job) -> dict[str, Any]:
    """Compare the samples of all data-parallel ranks together, from the job's own source, with those of one process.
    Raises ConfigError for missing files.
    """
    job_of_order, reason = with_own_data(job, small)
    if wrong := _misplaced(job_of_order):
        reason = f"not so at {wrong}"
    return {"passed": not wrong, "source": job_of_order.data.name, "steps": STEPS_OF_DATA, "reason": reason or None}


def _misplaced(job: Job) -> str:
    """Return the first step and tensor that differ from those of one process; "" if all are equal."""
    ranks = data_parallel(job)
    loaders, whole = [data.build(job, rank, ranks) for rank in range(ranks)], data.build(job, 0, 1)
    try:
        for step in range(1, STEPS_OF_DATA + 1):
            parts, batch = [loader.next() for loader in loaders], whole.next()
            for name, tensor in batch.tensors.items():
                together = torch.cat([part[name] for part in parts], batch.dims[name].samples)
                if not torch.equal(together, tensor):
                    return f"step {step}, {name}"
    finally:
        for loader in (*loaders, whole):
            loader.close()
    return ""


def trained(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train a reduced job without interruption, and again with a kill and a resume. Then export and import its weights."""
    with tempfile.TemporaryDirectory(prefix="verify-", ignore_cleanup_errors=True) as folder:
        resume, run = killed_and_carried_on(job, Path(folder))
        if layout.RESULT.read(run).get("status") != "done":
            return resume, {"passed": None, "reason": "not done, as the run has failed"}
        return resume, exported_and_imported(run, job, Path(folder))


def killed_and_carried_on(job: Job, folder: Path) -> tuple[dict[str, Any], Path]:
    """Train a reduced job twice, once without interruption, and once killed after its first checkpoint and resumed.
    Returns whether every loss and gradient norm has the same bits, and the directory of the uninterrupted run.
    """
    with contextlib.redirect_stdout(sys.stderr):
        whole = _cell(job, folder / "undisturbed")
        if status := _begin(whole):
            return {
                "passed": False,
                "reason": f"the undisturbed run ended with exit status {int(status)}",
            }, whole.directory
        for turn in range(TRIES):
            broken = _cell(job, folder / f"killed_{turn}")
            at, saved = _run_until_killed(broken)
            if saved:
                break
        else:
            return {"passed": False, "reason": "the run was over before it could be killed"}, whole.directory
        status = _begin(_cell(job, folder / f"killed_{turn}", retry="all"))
    rows, others = (_numbers(cell.directory) for cell in (whole, broken))
    differing = [step for step in rows if rows[step] != others.get(step)]
    return {
        "passed": not status and not differing and len(rows) == STEPS,
        "steps": STEPS,
        "killed_at_step": at,
        "carried_on_from_step": saved,
        "first_other_bits": min(differing, default=None),
        "reason": f"the run that was carried on ended with exit status {int(status)}" if status else None,
    }, whole.directory


def _cell(job: Job, runs: Path, retry: str = "none") -> Cell:
    new = copy.deepcopy(job)
    new.paths, new.launch, new.steps = Paths(str(runs)), Launch(retry=retry, oom_check="off"), STEPS
    new.checkpoint = Checkpoint(new.checkpoint.name, interval=INTERVAL, keep_latest_k=0)
    return Cell(1, [], new, rundir.directory_of(new), 1)


def _begin(cell: Cell) -> int:
    """Run a cell to its end, and return its exit status. Raises KeyboardInterrupt if Ctrl-C or SIGTERM has stopped it."""
    status = dispatch.begin([cell])
    if status > 128:
        raise KeyboardInterrupt
    return status


def _run_until_killed(cell: Cell) -> tuple[int, int]:
    """Start a run and kill it. Returns the last step that the run has logged and the step of its newest checkpoint;
    both are 0 if the run was done before the kill.
    """
    ended = threading.Event()
    killer = threading.Thread(target=_kill_after_a_save, args=(cell.directory, ended), daemon=True)
    killer.start()
    _begin(cell)
    ended.set()
    killer.join()
    if rundir.state(cell.directory).kind == "done":
        return 0, 0
    return layout.METRICS.last(cell.directory).get("step", 0), _last_save(cell.directory)


def _kill_after_a_save(directory: Path, ended: threading.Event) -> None:
    """Send SIGKILL to all ranks once the run has a complete checkpoint."""
    while not ended.wait(0.02):
        if _last_save(directory):
            for rank in rundir.running_ranks(layout.ATTEMPT.of(directory, 1)):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank["pid"], signal.SIGKILL)
            return


def _last_save(directory: Path) -> int:
    """Return the step of the newest complete checkpoint; 0 if there is none."""
    return max(map(checkpoints.step_of, checkpoints.complete(layout.CHECKPOINTS.of(directory))), default=0)


def _numbers(directory: Path) -> dict[int, tuple[float, float]]:
    """Return the loss and the gradient norm of each step."""
    return {row["step"]: (row["loss"], row.get("grad_norm")) for row in layout.METRICS.rows(directory)[0]}


def exported_and_imported(run: Path, job: Job, folder: Path) -> dict[str, Any]:
    """Export the last weights of a run to Hugging Face's format, import them again, and compare every bit."""
    if job.adapter.name != "none":
        return {"passed": None, "reason": f"adapter={job.adapter.name}: an export merges the adapters into the weights"}
    step, after = checkpoints.complete(layout.CHECKPOINTS.of(run))[-1], folder / "exported"
    before = Reader(step)
    try:
        convert.export_hf(step, after)
        record = hf_of(job.model)
        if record.model_type:  # the folder's config.json names the family
            convert.import_hf(after, folder / "imported", imports=job.train.imports)
            imported: Reader | Folder = (checkpoint := Reader(folder / "imported"))
            names = [name for name in checkpoint.metadata.state_dict_metadata if name.startswith(PREFIX)]
        else:
            imported = Folder(after, record)
            names = [PREFIX + name for name in imported.dtypes(meta_state(job.model))]
    except ConfigError as error:  # raised if the family has no Hugging Face format
        return {"passed": None, "reason": str(error)}
    except RunError as error:
        return {"passed": False, "reason": str(error)}
    differing = []
    for name in names:
        entry: Any = before.metadata.state_dict_metadata.get(name)
        if entry is None or not torch.equal(
            *(reader.tensor(name.removeprefix(PREFIX), entry.size, torch.float32) for reader in (before, imported))
        ):
            differing.append(name.removeprefix(PREFIX))
    return {"passed": bool(names) and not differing, "tensors": len(names), "differing": differing, "reason": None}
