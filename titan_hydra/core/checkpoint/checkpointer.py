"""When a checkpoint is written, what happens if that fails, and from which checkpoint a run resumes.

A failed save is tried once more, one step later, while training continues. If two saves in a row fail, each with its
second try, the run stops; no more than two intervals are lost then. The rules are in docs/reliability.md.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from titan_hydra.core.base.errors import CheckpointError
from titan_hydra.core.base.private import keep_staged, staging_executor
from titan_hydra.core.base.threads import device_setter
from titan_hydra.core.job.config.model import Model
from titan_hydra.core.job.config.operation import Checkpoint
from titan_hydra.core.job.parametrization import Rules
from titan_hydra.core.job.run import checkpoints, layout
from titan_hydra.core.job.run.checkpoints import is_hf
from titan_hydra.core.job.run.inputs import initial_weights, record_weights
from titan_hydra.core.job.run.run import Run
from titan_hydra.core.models.init import clean_name

from . import safe, state
from .convert import check_scales, frozen_weights, read_model_config
from .folder import load_hf
from .planner import LOWER, MODEL, SavePlanner
from .writer import Writer

PARTS = {"model", "optimizer", "outer"}  # parts of a step that DCP writes; each rank's data state is a file of its own
TRIES = 4  # number of failures in a row that end a run, as each of two saves is tried twice
LONGEST = timedelta(hours=1)  # time-out of the collectives in which a rank waits for the disks of other ranks


@dataclass
class PendingSave:
    """A save that has begun and is not known to be complete."""

    step: int
    writer: Writer
    began: float  # by time.perf_counter
    staged: Future | None = None  # DCP's future that is done once the weights are copied
    written: Future | None = None  # DCP's future that is done once the step is complete
    held: float = 0.0  # seconds for which the save has blocked the training thread so far
    held_out: float = inf  # held-out loss of the weights that are saved
    seconds: float | None = None  # seconds from `began` until the step was complete


@dataclass
class Checkpointer:
    """Saves and loads a model, its optimizers and each rank's data state. All ranks must call the same methods in the
    same order.
    """

    config: Checkpoint
    run: Run
    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    outer: dict[str, torch.Tensor] = field(default_factory=dict)  # this rank's outer state of Local SGD or DiLoCo
    report: Callable[..., None] = lambda event, step, **values: None  # writes a row of events.jsonl: Metrics.event
    leave_out: Callable[[], AbstractContextManager] = nullcontext  # leaves a block out of the steps: Clock.leave_out
    pending: PendingSave | None = None
    failures: int = 0  # number of attempts to save that have failed in a row
    again: bool = False  # whether the last save failed and is to be tried once more
    saved: int = -1  # newest complete step that this process has written or read
    best: float = inf  # lowest held-out loss of all complete steps
    read_back: bool = False  # whether this process has written a step and read a part of it back
    bin: checkpoints.Bin = field(default_factory=checkpoints.Bin)

    def __post_init__(self) -> None:
        self.clock = time.monotonic()
        self.on = self.config.name != "off"
        # A separate group, so that the collectives of a saving thread cannot mix with those of the step. Its backend is
        # gloo, as the data are on the host.
        self.group = dist.new_group(backend="gloo", timeout=LONGEST) if self.on else None
        self.stager = self._new_stager() if self.config.name in ("async", "async_pinned") else None

    def _new_stager(self) -> DefaultStager:
        pinned = self.config.name == "async_pinned" and torch.cuda.is_available()
        stager = DefaultStager(StagingOptions(pinned, False, True, pinned))
        staging_executor(stager).submit(device_setter())
        keep_staged(stager)
        return stager

    @property
    def base(self) -> nn.Module:
        """The module that initial_load_path fills: with adapters the frozen model, else the whole model."""
        return getattr(self.model, "frozen", None) or self.model

    @property
    def folder(self) -> Path:
        return layout.CHECKPOINTS.of(self.run.directory)

    # --- in the loop --------------------------------------------------------------------------------------------------

    def votes(self) -> list[float]:
        """Return two flags for the all-reduce of each step: whether interval_minutes have passed (only rank 0 decides
        this), and whether the pending save has ended on this rank.
        """
        minutes = self.config.interval_minutes
        late = self.run.rank == 0 and minutes is not None and time.monotonic() - self.clock >= 60 * minutes
        return [float(late), float(self.pending is not None and self.pending.written.done())]

    def wait_for_staging(self) -> float:
        """Wait until the pending save has copied the weights, and return the seconds of waiting. This must be called
        before the optimizer changes the weights.
        """
        if self.pending is None or self.pending.staged is None:
            return 0.0
        # the device may still compute gradients meanwhile, and only a wait that is longer than that is the save's
        with self.leave_out():
            began = time.perf_counter()
            self.pending.staged.result()
            held = time.perf_counter() - began
        self.pending.staged = None
        self.pending.held += held
        return held

    def after_step(
        self, step: int, votes: list[float], data_state: dict[str, Any], last: bool, stop: bool, held_out: float = inf
    ) -> None:
        """Save if a save is due; at the end of the run, wait until the save is complete. `votes` are the sums of
        `votes()` over all ranks; `held_out` is the held-out loss, if it was measured at this step.
        """
        if not self.on:
            return
        late, ended = votes
        if self.pending is not None and ended == self.run.world_size:
            self.finish_pending()
        lowest = min(self.best, self.pending.held_out if self.pending else inf)
        if stop or self.again or self._due(step, late > 0, last) or (self.config.keep_best and held_out < lowest):
            self.save(step, data_state, held_out)
        if last or stop:
            self.finish_pending()
            if self.again:  # the second try comes at once, because no further step follows
                self.save(step, data_state, held_out)
                self.finish_pending()
            if self.failures and (stop or self.config.last_step):
                raise CheckpointError(self._lost(step))

    def _due(self, step: int, late: bool, last: bool) -> bool:
        """Whether to save at this step: it is the first, the last or one of the interval's steps, as configured, or
        (`late`) too many minutes have passed since the last save.
        """
        if last:
            return self.config.last_step
        return (
            late
            or (step == 1 and self.config.first_step)
            or bool(self.config.interval and step % self.config.interval == 0)
        )

    def save(self, step: int, data_state: dict[str, Any], held_out: float = inf) -> None:
        """Begin a save. Wait for the pending one first, as two copies of the weights may not fit in the host's memory."""
        if step == self.saved:
            return
        self.finish_pending()
        with self.leave_out():
            began, self.clock = time.perf_counter(), time.monotonic()
            file_of_rank = (state.rank_file(self.run.rank), state.of_rank(self.run.world_size, data_state))
            writer = Writer(
                checkpoints.step_folder(self.folder, step),
                step,
                self.run.world_size,
                own=file_of_rank,
                done=self._purge,
                check=not self.read_back,
                held_out=held_out if isfinite(held_out) else None,
            )
            self.pending = PendingSave(step, writer, began, held_out=held_out)
            self._start(self.pending, self._content(PARTS, self.model))
            self.pending.held += time.perf_counter() - began
        if self.stager is None:
            self.finish_pending()

    def _start(self, pending: PendingSave, content: dict[str, Any]) -> None:
        """Write the content in this thread (checkpoint=sync), or copy it and write it in other threads."""
        if self.stager is None:
            pending.written = Future()
            try:
                pending.written.set_result(
                    dcp.save(content, storage_writer=pending.writer, planner=SavePlanner(), process_group=self.group)
                )
            except (Exception, CheckpointException) as error:
                pending.written.set_exception(error)
            pending.seconds = time.perf_counter() - pending.began
            return
        if torch.cuda.is_available():
            # wait, as the last update may still be running on this stream, and the copy runs on another one
            torch.cuda.synchronize()
        response: Any = dcp.async_save(
            content,
            storage_writer=pending.writer,
            planner=SavePlanner(),
            process_group=self.group,
            async_stager=self.stager,
        )
        pending.staged, pending.written = response.staging_completion, response.upload_completion
        pending.written.add_done_callback(lambda _: setattr(pending, "seconds", time.perf_counter() - pending.began))

    def finish_pending(self) -> None:
        """Wait for the pending save, if there is one, and report whether it is complete. Raises CheckpointError after
        TRIES failures in a row.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            with self.leave_out():
                self._finish(pending)

    def _finish(self, pending: PendingSave) -> None:
        """Await a save in the background, and report whether it succeeded. After a failure, the next step tries again,
        once; the second failure in a row waits for the next interval.
        """
        began = time.perf_counter()
        failure = pending.written.exception()
        pending.held += time.perf_counter() - began if self.stager else 0.0
        if failure is None:
            self.saved, self.failures, self.again, self.read_back = pending.step, 0, False, True
            self.best = min(self.best, pending.held_out)
            seconds = pending.seconds or time.perf_counter() - pending.began
            self.report("checkpoint", pending.step, seconds=seconds, seconds_held=pending.held)
            return
        # DCP has not sent this error to all ranks (another rank may be lost), so the ranks cannot agree on another
        # attempt.
        if not isinstance(failure, CheckpointException):
            raise failure
        if self.run.rank == 0:
            pending.writer.abandon()
        self.failures += 1
        self.again = self.failures % 2 == 1
        self.reason = reason_of(failure)
        # The step was written but cannot be read back, so another attempt would not help.
        if any(isinstance(error, CheckpointError) for error, _ in failure.failures.values()):
            raise CheckpointError(self._lost(pending.step))
        self.report(
            "checkpoint_failed", pending.step, reason=self.reason, failures=self.failures, seconds_held=pending.held
        )
        if self.run.rank == 0:
            then = "it is tried again" if self.again else "training continues"
            print(f"WARNING: {self._lost(pending.step)}; {then}", file=sys.stderr, flush=True)
        if self.failures == TRIES:
            raise CheckpointError(f"{self._lost(pending.step)}; {TRIES} tries in a row have failed")

    def _lost(self, step: int) -> str:
        newest = checkpoints.newest(self.folder)
        return f"the checkpoint of step {step} could not be written to {self.folder}: {self.reason}; " + (
            f"the newest complete one is {newest.name}" if newest else "there is no earlier one"
        )

    def _purge(self) -> None:
        """Delete the steps that need not be kept. The writer calls this on rank 0 when a step is complete."""
        self.bin.throw(
            checkpoints.surplus(self.folder, self.config.keep_latest_k, self.config.keep_every, self.config.keep_best)
        )

    def close(self) -> None:
        """Wait for the threads that copy weights and delete steps."""
        if self.stager is not None:
            self.stager.close()
        self.bin.wait()

    # --- at the start and the end -------------------------------------------------------------------------------------

    def resume(self) -> tuple[int, dict[str, Any] | None]:
        """Load the newest complete and intact step. Return its number and the merged data state; (0, None) if there is no
        such step.
        """
        if not self.on:
            return 0, None
        if self.run.rank == 0:
            self.bin.throw(checkpoints.leftovers(self.folder))
        path = self._newest_intact()
        if path is None:
            return 0, None
        if self.base is not self.model and self.config.initial_load_path:  # the run's steps hold only adapters
            self.start_from(self.config.initial_load_path, read_model_config(path))
        self._load(path, PARTS, self.model)
        self.saved = checkpoints.step_of(path)
        return self.saved, state.restore_rank(path, self.run.rank, self.run.world_size)

    def start_from(self, path: str, model: Model, rules: Rules | None = None) -> tuple[int, dict[str, Any] | None]:
        """Load another run's checkpoint, without the parts in exclude_from_loading, or the weights of a Hugging Face
        folder. Return the step and the merged data state to continue from; (0, None) to begin at step 1. Raises
        ConfigError if the weights were trained with other scales than those of `rules`. Adapters go on from another run's
        adapters, beside the same frozen weights.
        """
        # All ranks load what rank 0 has found; the others do not read it from the run directory, which may lag there.
        folder_of_rank_0: list[Any] = [None]
        if self.run.rank == 0:
            record_weights(self.run.home, path)
            folder = initial_weights(self.run.home, path)
            folder_of_rank_0 = [(folder, frozen_weights(folder))]
        dist.broadcast_object_list(folder_of_rank_0, src=0, group=self.group)
        (source, frozen), left_out = folder_of_rank_0[0], set(self.config.exclude_from_loading)
        if rules is not None:
            check_scales(source, rules)
        if frozen is not None and is_hf(frozen):
            load_hf(self.base, model, frozen)
        elif is_hf(source):
            load_hf(self.base, model, source)
            return 0, None
        for folder in {source, frozen or source}:
            if problems := self._problems(folder) if layout.MANIFEST.of(folder).exists() else []:
                raise CheckpointError(f"{folder} is damaged: {'; '.join(problems)}")
        if frozen is not None and not is_hf(frozen):
            self._load(frozen, {"model"}, self.base)
        self._load(source, {"model", "optimizer"} - left_out, self.model if frozen else self.base)
        data_state = None if "data" in left_out else state.restore_rank(source, self.run.rank, self.run.world_size)
        return 0 if "lr_scheduler" in left_out else checkpoints.step_of(source), data_state

    def save_weights(self, path: Path, sections: dict[str, Any], dtype: str) -> None:
        """Write only `model.*`, in the dtype `dtype`, with a config.json of `sections`. The folder is complete or
        absent.
        """
        # Buffers keep their dtype, as they accumulate values that are too small for 16 bits.
        buffers = {clean_name(name) for name, _ in self.model.named_buffers()}
        content = self._content({MODEL}, self.model)
        dtypes = {f"{MODEL}.{name}": getattr(torch, dtype) for name in content[MODEL] if name not in buffers}
        content_of_config = json.dumps({name: asdict(section) for name, section in sections.items()}, indent=2) + "\n"
        config_json = (layout.CONFIG.name, content_of_config) if self.run.rank == 0 else None
        writer = Writer(path, 0, self.run.world_size, config_json)
        try:
            dcp.save(content, storage_writer=writer, planner=SavePlanner(dtypes), process_group=self.group)
        except CheckpointException as error:
            if self.run.rank == 0:
                writer.abandon()
            raise CheckpointError(f"{path} could not be written: {reason_of(error)}") from error

    def _content(self, parts: set[str], model: nn.Module) -> dict[str, Any]:
        """Return this rank's share of the given PARTS of a step, with the weights of `model`."""
        content: dict[str, Any] = (
            {MODEL: state.weights(model), LOWER: state.lower_halves(model)} if MODEL in parts else {}
        )
        if "optimizer" in parts:
            content["optimizer"] = state.of_optimizers(self.model, self.optimizers)
        if "outer" in parts and self.outer:
            content["outer"] = self.outer
        return content

    def _load(self, path: Path, parts: set[str], model: nn.Module) -> None:
        """Load `parts` of a checkpoint (model, optimizer, data ...) into the model and the optimizers. Raises
        CheckpointError.
        """
        content = self._content(parts, model)
        if "optimizer" in parts:
            content["optimizer"] |= state.changeable(self.model, self.optimizers)
        try:
            safe.load_checkpoint(content, path, self.group)
        except (Exception, CheckpointException) as error:
            raise CheckpointError(f"{path} cannot be loaded: {reason_of(error)}") from error
        if MODEL in parts:
            set_model_state_dict(model, content[MODEL])
        if "optimizer" in parts:
            state.into_optimizers(self.model, self.optimizers, content["optimizer"])

    def _newest_intact(self) -> Path | None:
        """Return the folder of the step to resume from; None if there is no step. Damaged steps are moved aside. Raises
        CheckpointError if all steps are damaged.
        """
        best = checkpoints.best(self.folder) if self.config.keep_best else None
        seen: list[Any] = [
            [path.name for path in reversed(checkpoints.complete(self.folder))],
            any(self.folder.glob(f"*{checkpoints.DAMAGED}")),
            checkpoints.held_out_loss(best) if best else inf,
        ]
        # what rank 0 sees counts, as a file system may show an older state to other ranks
        dist.broadcast_object_list(seen, src=0, group=self.group)
        newest_first, any_set_aside, self.best = seen
        damaged: dict[Path, list[str]] = {}
        intact = None
        for path in (self.folder / name for name in newest_first):
            problems = self._problems(path)
            if not problems:
                intact = path
                break
            damaged[path] = problems
        reasons = "; ".join(f"{path.name}: {', '.join(problems)}" for path, problems in damaged.items())
        if intact is None and (damaged or any_set_aside):
            raise CheckpointError(
                f"no checkpoint in {self.folder} is intact ({reasons or 'all are set aside as damaged'}); "
                "launch.force=true starts again from scratch"
            )
        if intact and damaged and self.run.rank == 0:
            print(
                f"WARNING: damaged, and left out: {reasons}. Going on from {intact.name}", file=sys.stderr, flush=True
            )
            for path in damaged:
                aside = path.with_name(path.name + checkpoints.DAMAGED)
                shutil.rmtree(aside, ignore_errors=True)  # delete a folder of the same step that was set aside earlier
                path.rename(aside)
        return intact

    def _problems(self, path: Path) -> list[str]:
        """Return what is wrong with a step's files. Each rank reads a share of them; all ranks must call this together."""
        problems_of_ranks: list[Any] = [None] * self.run.world_size
        dist.all_gather_object(
            problems_of_ranks, checkpoints.damage(path, self.run.rank, self.run.world_size), group=self.group
        )
        return [problem for problems in problems_of_ranks for problem in problems]


def reason_of(failure: BaseException) -> str:
    """Return one line for a failure. A DCP error has the tracebacks of all ranks; the line is the lowest rank's."""
    where = ""
    if isinstance(failure, CheckpointException):
        rank, (failure, _) = min(failure.failures.items())
        where = f"rank {rank}: "
    return where + (str(failure).strip() or type(failure).__name__).splitlines()[-1]
