"""Verify that a layout learns what one process learns: the same losses, gradient norms, gradients and weights.

matrix.py has a line for each case. Cases of one number of ranks share gloo processes, and train as a run does.
"""

import contextlib
import dataclasses
import hashlib
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from titan_hydra.core import data, models
from titan_hydra.core.data.batch import Batch
from titan_hydra.core.job.config import Job, from_dict, to_dict
from titan_hydra.core.job.config.fault import counted
from titan_hydra.core.job.parametrization import rules_of
from titan_hydra.core.job.ranks import DEGREES
from titan_hydra.core.models.init import init_weights, local_box
from titan_hydra.core.parallel import lora
from titan_hydra.core.parallel.mesh import Mesh, build_mesh, local_part
from titan_hydra.core.parallel.split_masters import master_of
from titan_hydra.core.train.objectives.language import IGNORED, packed
from titan_hydra.core.train.optimizer import lr_factor, set_lr
from titan_hydra.core.train.trainer import Trainer, build
from titan_hydra.experiments.compose.compose import compose_job, later_wins

from .case import BASE, Case
from .draws import CutLinears, disturb, shuffled
from .export import export_differs
from .judge import (
    DRAWS,
    MORE_DRAWS,
    NEAR,
    REFUSED,
    Differences,
    Outcome,
    beyond,
    compare,
    differ,
    flips,
    lost,
    parts_of_linears,
    rounds_alike,
    whole_parts,
    widen,
)
from .processes import Crashed, Raised, share_over_cores, spawn_ranks
from .reference import Trace, train_in_float64
from .restart import restarted
from .sums import reductions, rounded, wrong_sums
from .threads import as_threads

STEPS = 10  # optimizer steps of a case
SECONDS = 10  # about what a case takes on two cores, with its reference and its bands
HELD_OUT = 2  # global batches of a validation
TOTAL = "total"  # name of the file with the number of cases
NOTE = "in the case"  # beginning of the note by which an exception names its case


def job_of(case: Case, steps: int = STEPS) -> Job:
    """Return the job of a case's layout."""
    return compose_job(*later_wins(*BASE, f"steps={steps}", *case.base, *case.overrides), config_dir=case.config_dir)


def reference_of(case: Case, steps: int = STEPS) -> Job:
    """Return the job of a case's reference: one process, whose local batch is `case.microbatch` or the global batch."""
    alone = later_wins(*BASE, f"steps={steps}", *case.base, "parallelism=single", "data.local_batch=1")
    job = compose_job(*alone, config_dir=case.config_dir)
    job.data.local_batch = case.microbatch or job.data.global_batch
    return job


def trace(
    job: Job,
    device: torch.device,
    case: Case | None = None,
    seed: int | None = None,
    mesh: Mesh | None = None,
    then: Job | None = None,
) -> Trace:
    """Train a job as `train` does, and return the values to compare, as whole tensors, on every rank. A collective.

    A `seed` changes the last bits of the initial weights (`disturb`) and the order of samples, but not the samples of each
    of the case's microbatches. `mesh` is reused from an earlier job with the same degrees. With `then`, the second half of
    the steps is made by a new trainer of the job `then`, which has loaded a checkpoint.
    """
    trainer = build(job, device, mesh)
    if seed is not None:
        disturb(trainer, seed)
    result = Trace([], [], {}, _of_all_stages(trainer, master_of), {}, [], {})
    loader = data.build(job, trainer.mesh.data_rank, trainer.mesh.data_ranks)
    for step in range(1, job.steps + 1):
        if then is not None and step == job.steps // 2 + 1:
            trainer, loader, forgotten = restarted(trainer, loader, step - 1, then)
            result.odd += forgotten
        batch = loader.next()
        if case is not None:
            batch = vary(batch, case, step, job.data.global_batch, first=trainer.mesh.data_rank * batch.samples)
        if seed is not None:
            batch = shuffled(batch, seed * 1000 + step, (case and case.microbatch) or batch.samples)
        set_lr(trainer.optimizers, lr_factor(step, job.steps, trainer.job.lr_scheduler))
        with reductions(trainer) as dtypes:
            share = trainer.forward_backward(batch)
        if step == 1:
            result.rounded += wrong_sums(*dtypes, getattr(torch, job.precision.reduce_dtype))
            result.gradients = _of_all_stages(trainer, lambda parameter: parameter.grad)
        agreement = trainer.agree(share, trainer.measure())
        trainer.update(agreement)
        result.loads.append(loads(trainer))
        loss, norm, _, columns = agreement.read()
        take(result, loss, columns)
        result.norms.append(norm)
    loader.close()
    if case is not None and case.validated:
        take(result, *validated(job, trainer, 1 if then is None else 2))
    if case is not None and case.exported:
        result.export = export_differs(trainer, held_out_of(job))
    result.weights = _of_all_stages(trainer, master_of)
    result.biases = _buffers(trainer)
    result.drift = drift(trainer)
    result.rounded += rounded(trainer, result.gradients)
    return result


def take(result: Trace, loss: float, columns: list[float]) -> None:
    """Add the loss and the objective's columns of a step or of a validation."""
    result.losses.append(loss)
    result.columns += columns


def validated(job: Job, trainer: Trainer, times: int) -> tuple[float, list[float]]:
    """Validate one or several times, each time on the same samples, and return the last loss and columns. A collective."""
    held_out = data.build(job, trainer.mesh.data_rank, trainer.mesh.data_ranks, split="validation")
    with trainer.held_out_weights():
        loss, columns = [trainer.validate(held_out, HELD_OUT) for _ in range(times)][-1]
    held_out.close()
    return loss, [*columns.values()]


def loads(trainer: Trainer) -> dict[str, list[float]]:
    """Return the number of tokens of each expert in the last step, over all ranks, by layer. A collective."""
    names = [name for name, part in trainer.model.named_modules() if hasattr(part, "router")]
    return _join(trainer, dict(zip(names, trainer.balance.loads.tolist(), strict=True)) if trainer.balance else {})


def drift(trainer: Trainer) -> int:
    """Count the shards of weights whose copies on several ranks differ in any bit. A collective."""
    my_digests = {}
    for name, parameter in trainer.masters.weights.named_parameters():
        local = local_part(master_of(parameter))
        part = (name, *map(tuple, local_box(parameter)))
        my_digests[part] = hashlib.sha256(
            local.detach().contiguous().cpu().view(torch.uint8).numpy().tobytes()
        ).hexdigest()
    everyone: list[dict] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, my_digests)
    values = defaultdict(set)
    for parts in everyone:
        for part, digest in parts.items():
            values[part].add(digest)
    return sum(len(digests) > 1 for digests in values.values())


def _of_all_stages(trainer: Trainer, value: Callable[[torch.nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return `value` of each parameter of the model, as whole tensors by name. A collective."""
    return _join(
        trainer,
        {name: _whole(value(parameter)).clone() for name, parameter in trainer.masters.weights.named_parameters()},
    )


def _buffers(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Return the buffers of all stages that a checkpoint has. A collective."""
    stored = trainer.model.state_dict()
    return _join(trainer, {name: buffer.clone() for name, buffer in trainer.model.named_buffers() if name in stored})


def _join(trainer: Trainer, of_this_rank: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of all pipeline stages. This is a collective over the pipeline ranks."""
    if trainer.mesh.pipeline is None:
        return of_this_rank
    parts: list[dict[str, Any]] = [{}] * dist.get_world_size(trainer.mesh.pipeline)
    dist.all_gather_object(parts, of_this_rank, group=trainer.mesh.pipeline)
    return {name: value for part in parts for name, value in part.items()}


def exact(job: Job, case: Case) -> Trace:
    """Return the trace of a job as reference.py computes it in float64, from the job's initial weights and batches. The
    keys of the optimizer in `case.then` apply in the second half of the steps.
    """
    with torch.device("meta"):
        model = models.build(job.model, job.data.seq_len)
    lora.apply(model, Mesh(job.parallelism, None, None, None, None), job)
    model.to_empty(device="cpu")
    init_weights(model, job.model, job.seed, rules_of(job.model, job.parametrization))
    start = {name: parameter.detach() for name, parameter in model.named_parameters()}
    loader = data.build(job, 0, 1)
    traced = train_in_float64(
        job,
        start,
        lambda step: vary(loader.next(), case, step, job.data.global_batch, first=0),
        held_out_of(job) if case.validated else (),
        reference_of(dataclasses.replace(case, base=(*case.base, *case.then)), job.steps) if case.then else job,
    )
    loader.close()
    return traced


def held_out_of(job: Job) -> list[Batch]:
    """Return the held-out batches of a job in one process."""
    loader = data.build(job, 0, 1, split="validation")
    batches = [loader.next() for _ in range(HELD_OUT)]
    loader.close()
    return batches


def vary(batch: Batch, case: Case, step: int, slots: int, first: int) -> Batch:
    """Apply a case's mask and documents to a batch of text whose first sample is in slot `first` of `slots`. Mask and
    documents depend only on slot and step.

    Up to 80 % of a sample's labels are ignored, so that microbatches have different numbers of labels. All labels are
    ignored in the first quarter of the slots at step 1, and in the first half at step 2, so that some ranks have no
    labels; with `empty_step`, all labels are ignored at step 2. The first token of a document is no label.
    """
    if not case.uneven_mask and not case.documents:
        return batch
    shape = batch["labels"].shape
    documents = torch.zeros(shape, dtype=torch.int64)
    for row in range(shape[0]):
        dice = torch.Generator().manual_seed((slot := first + row) * 10007 + step)
        share = 1.0 if (slot + 1) * 4 <= slots * (step if step < 3 else 0) else (slot * 37 + step * 61) % 81 / 100
        if case.uneven_mask:
            batch["labels"][row, torch.rand(shape[1], generator=dice) < share] = IGNORED
        documents[row] = (torch.rand(shape[1], generator=dice) < 0.1).cumsum(0)
    if case.empty_step and step == 2:
        batch["labels"].fill_(IGNORED)
    if case.documents:
        batch["labels"][:, :-1][documents[:, 1:] != documents[:, :-1]] = IGNORED
    arrays = packed(documents.numpy()) if case.documents else {}
    return Batch(batch.tensors | {name: torch.from_numpy(array) for name, array in arrays.items()}, batch.dims)


def verify(cases: Iterable[Case], steps: int = STEPS, bands_of_failed: bool = True) -> list[Outcome]:
    """Run cases and their references, with one set of processes for each number of ranks. Returns an outcome for each
    case, in their order. Without `bands_of_failed`, no band is measured for a case that is beyond its fixed bounds.
    """
    cases = list(cases)
    firsts: dict[str, Case] = {}
    for case in cases:
        firsts.setdefault(reference_key(case), case)
    about = f"about {-(-len(cases) * SECONDS // 60)} min on two cores"
    _tell(f"{counted(len(cases), 'case')} and {counted(len(firsts), 'reference')}, {about}")
    jobs = [job_of(case, steps) for case in cases]
    return prove(cases, jobs, {key: (case, reference_of(case, steps)) for key, case in firsts.items()}, bands_of_failed)


def verify_drawn(cases: Iterable[Case], steps: int) -> list[Outcome]:
    """Verify random cases as `verify` does. A case that fails, although rounding alone may be the cause
    (`Outcome.unsure`), is verified once more with the weights and the data of another seed, and that outcome counts: a
    fault of a layout shows with any seed, an accident does not.
    """
    outcomes = verify(cases, steps)
    unsure = {number: outcome.case for number, outcome in enumerate(outcomes) if outcome.unsure}
    for number in unsure:
        _tell(f"verified again with another seed, as rounding may be the cause: {outcomes[number]}")
    again = [
        dataclasses.replace(case, name=f"{case.name}, another seed", base=(*case.base, f"seed={1000 + number}"))
        for number, case in unsure.items()
    ]
    for number, outcome in zip(unsure, verify(again, steps) if again else (), strict=True):
        outcomes[number] = outcome
    return outcomes


def prove(
    cases: list[Case], jobs: list[Job], references: dict[str, tuple[Case, Job]], bands_of_failed: bool = True
) -> list[Outcome]:
    """Run the job of each case; cases with equal `reference_key` share one run of the reference. Returns an outcome for
    each case.
    """
    by_ranks: dict[tuple[bool, int], list[tuple[int, Case, dict]]] = defaultdict(list)
    for number, (case, job) in enumerate(zip(cases, jobs, strict=True)):
        by_ranks[case.threads, case.ranks].append((number, case, to_dict(job)))
    with tempfile.TemporaryDirectory() as folder:
        share_over_cores(
            _run_references, folder, [(key, case, to_dict(job)) for key, (case, job) in references.items()]
        )
        Path(folder, TOTAL).write_text(str(len(cases)))
        for (threads, ranks), of_ranks in sorted(by_ranks.items()):
            of_ranks.sort(key=lambda job: job[1].slow)  # the slowest last
            _run_all(1 if threads else ranks, _run_in_threads if threads else _run_cases, folder, of_ranks)
        outcomes = [_read(folder, number, case) for number, case in enumerate(cases)]
        # Indices of the cases beyond the tight tolerances. Cases with the same reference and the same parts of linears
        # share a band.
        judged = defaultdict(list)
        for number, (outcome, job) in enumerate(zip(outcomes, jobs, strict=True)):
            case, alone = references[reference_key(outcome.case)]
            alike = case.reference == "process" and rounds_alike(job, alone)
            wanted = bands_of_failed or outcome.passed
            if wanted and not outcome.error and alike and beyond(outcome.differences, {}, {}) > 1:
                judged[reference_key(case), parts_of_linears(job)].append(number)
        if judged:
            draws = [
                (numbers, cut, cases[numbers[0]], to_dict(references[key][1])) for (key, cut), numbers in judged.items()
            ]
            share_over_cores(_run_draws, folder, draws)
        return [_read(folder, number, case) for number, case in enumerate(cases)]


def _run_all(ranks: int, run: Callable[..., None], folder: str, jobs: list[tuple[int, Case, dict]]) -> None:
    """Run cases of one number of ranks, in `ranks` processes that call `run`. A case that raises, or crashes a rank twice,
    has failed; the remaining cases run in new processes.
    """
    crashed = None
    while jobs:
        try:
            spawn_ranks(ranks, run, folder, jobs)
            return
        except (Raised, Crashed) as error:
            lines = [line for line in str(error).splitlines() if line.strip()]
            reason = next(line for line in reversed(lines) if not line.startswith(NOTE))
            # If a rank refuses a case, only the reason and the notes behind it, which name the case, are printed.
            _tell(", ".join(lines[lines.index(reason) :]) if reason.startswith(REFUSED) else str(error))
            jobs = [job for job in jobs if not _file(folder, job[0]).exists()]
            if not jobs:
                raise
            number, case, _ = jobs[0]
            # a crashed case is tried once more: torch 2.13's gloo sometimes corrupts the heap
            if isinstance(error, Crashed) and number != crashed:
                crashed = number
                continue
            jobs = jobs[1:]
            _write(folder, number, lost(case, reason))


def _file(folder: str, number: int) -> Path:
    return Path(folder, f"outcome_{number}.json")


def _write(folder: str, number: int, outcome: Outcome) -> None:
    fields = dataclasses.asdict(outcome)
    del fields["case"]
    _file(folder, number).write_text(json.dumps(fields))


def _read(folder: str, number: int, case: Case) -> Outcome:
    return Outcome(case=case, **json.loads(_file(folder, number).read_text()))


def _run_references(device: torch.device, folder: str, jobs: list[tuple[str, Case, dict]]) -> None:
    for key, case, config in jobs:
        job = from_dict(Job, config)
        traced = exact(job, case) if case.reference == "float64" else trace(job, device, case)
        torch.save(dataclasses.asdict(traced), f"{folder}/{key}.pt")
        _tell(f"reference of {case.name}")


def _run_cases(device: torch.device, folder: str, jobs: list[tuple[int, Case, dict]]) -> None:
    """Train each case on the ranks of its layout, and write how far it is from its reference."""
    # Meshes are reused: each gloo group has a thread that wakes up a hundred times a second, so hundreds of groups
    # would slow down the cases.
    meshes: dict[tuple, Mesh] = {}
    for number, case, config in jobs:
        job = from_dict(Job, config)
        degrees = job.parallelism
        key = (*(getattr(degrees, name) for name in DEGREES), degrees.ep, job.model.sparse)
        try:
            if key not in meshes:
                meshes[key] = build_mesh(degrees, device.type, job.model.sparse)
            later = dataclasses.replace(case, overrides=(*case.overrides, *case.then))
            then = job_of(later, job.steps) if case.resumed else None
            run = trace(job, device, case, mesh=dataclasses.replace(meshes[key], degrees=degrees), then=then)
        except Exception as error:
            error.add_note(f"{NOTE} {case.name}")
            raise
        # torch limits how often the same code is compiled, and the next case compiles it for other blocks.
        torch.compiler.reset()
        if dist.get_rank() == 0:
            outcome = compare(case, run, Trace(**torch.load(f"{folder}/{reference_key(case)}.pt")))
            _write(folder, number, outcome)
            done, total = len([*Path(folder).glob("outcome_*.json")]), Path(folder, TOTAL).read_text()
            _tell(f"{done:>{len(total)}}/{total}  {case.name}: {'passed' if outcome.passed else 'NOT PASSED'}")
        dist.barrier()


def _run_in_threads(device: torch.device, folder: str, jobs: list[tuple[int, Case, dict]]) -> None:
    as_threads(jobs[0][1].ranks, lambda: _run_cases(device, folder, jobs))


def _run_draws(device: torch.device, folder: str, jobs: list[tuple[list[int], int, Case, dict]]) -> None:
    """Measure the bands of cases that share a reference and the parts of linears, and judge the cases. Each draw can only widen a band,
    so no more draws are made once all cases are within their bands.
    """
    for numbers, cut, case, config in jobs:
        reference = Trace(**torch.load(f"{folder}/{reference_key(case)}.pt"))
        spread: Differences = {}
        once = flips(reference, config["optimizer"]["name"])
        for seed, parts in (*DRAWS, *MORE_DRAWS):
            job = from_dict(Job, config)
            if case.microbatch is None:
                job.data.local_batch = job.data.global_batch // whole_parts(job.data.global_batch, parts)
            with CutLinears(cut, seed or 0) if cut > 1 else contextlib.nullcontext():
                spread = widen(spread, differ(trace(job, device, case, seed), reference, draw=True))
            outcomes = [_read(folder, number, case) for number in numbers]
            outcomes = [
                dataclasses.replace(outcome, band=beyond(outcome.differences, spread, once)) for outcome in outcomes
            ]
            for number, outcome in zip(numbers, outcomes, strict=True):
                _write(folder, number, outcome)
            _tell(f"band of {case.name}, linears in {cut}: {' '.join(f'{outcome.band:.2g}' for outcome in outcomes)}")
            wider = [outcome.band for outcome in outcomes if outcome.band > 1]
            if not wider or ((seed, parts) == DRAWS[-1] and max(wider) > NEAR):
                break


def _tell(line: str) -> None:
    """Print progress to the standard error, as the table comes only at the end (an hour later for the whole matrix)."""
    print(line, file=sys.stderr, flush=True)


def reference_key(case: Case) -> str:
    """Return a text that is the same for all cases that share a reference."""
    return hashlib.sha256(
        repr(
            (
                case.base,
                case.uneven_mask,
                case.documents,
                case.empty_step,
                case.validated,
                case.reference,
                case.microbatch,
                case.then if case.reference == "float64" else (),
            )
        ).encode()
    ).hexdigest()[:16]


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
