"""Prove the layouts of jobs (`titan verify JOB`): one proof.json for each layout, and the same as text.

The checks run at a reduced size: the layout must give the results of a single process, a killed run must resume, and
the weights must survive export and import. A proof is written only if no check has failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import to_json
from titan_hydra.core.job.config import Job, identity, to_dict
from titan_hydra.core.job.config.fault import bad_value, counted
from titan_hydra.core.job.config.operation import Paths
from titan_hydra.core.job.ranks import DEGREES, world_size
from titan_hydra.core.job.rules import checks
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import describe_code, import_modules, versions
from titan_hydra.core.job.run.frozen import load_job
from titan_hydra.experiments.compose.compose import compose_cells
from titan_hydra.experiments.plan import predict
from titan_hydra.experiments.plan.shape import NotPredictable
from titan_hydra.experiments.runs import proofs
from titan_hydra.experiments.runs.proofs import Proof
from titan_hydra.experiments.runs.view import choose

from .matrix import whole_matrix
from .reduce import JobPair, job_pairs, reduced, reduced_keys

if TYPE_CHECKING:
    from .judge import Outcome

MOST = 4  # default for the maximum number of ranks of a reduced job
# all sets of rules except those about this machine, as no job of full size is started
RULES = (checks.KEYS, checks.RANKS, checks.VALUES, checks.LAYOUT, checks.RECIPE)
COLUMNS = ("loss", "norm", "gradients", "weights")
EXACT = {"start": "start", "routing": "routing", "copies": "drift", "rounded": "rounded"}  # titles of what must be 0
CHANGES_SHOWN = 8


@dataclasses.dataclass
class Candidate:
    """A cell whose layout is to be proven: its job, the jobs of reduced size (`small`), each with its pairs (reduce.py)."""

    job: Job
    overrides: list[str]
    name: str
    small: list[Job]
    pairs: list[list[JobPair]]


def verify_jobs(args: argparse.Namespace) -> int:
    """Prove the layouts of the cells of a command line, or of runs. Returns 0 if all are proven, 1 if a check has
    failed, and 2 if a job breaks a rule or has no reduced form.
    """
    most = MOST if args.ranks is None else args.ranks
    if not 2 <= most <= 8:
        raise bad_value("--ranks", most, "the ranks of a reduced job", 2, 4, 8)
    began = time.monotonic()
    runs = not any("=" in word for word in args.overrides)
    cells = _of_runs(args) if runs else compose_cells(args.overrides, args.config_dir)
    if faults := [f"{name or 'the job'}: {fault}" for job, _, name in cells for fault in checks.check(job, RULES)]:
        print(*dict.fromkeys(faults), sep="\n", file=sys.stderr)
        return Exit.CONFIG
    proofs_by_folder = {proofs.folder_of_proof(job): proofs.proof_of(job) for job, _, _ in cells}
    wanted = {
        folder: cell for cell in cells if args.again or not proofs_by_folder[folder := proofs.folder_of_proof(cell[0])]
    }
    new_proofs = _prove([_candidate(*cell, most) for cell in wanted.values()], began)
    for folder, proof in zip(wanted, new_proofs, strict=True):
        proofs_by_folder[folder] = proof
        if proof.passed:
            _write(folder, proof)
    proven = {folder: proof for folder, proof in proofs_by_folder.items() if proof}
    seconds, passed = time.monotonic() - began, sum(proof.passed for proof in proven.values())
    if args.json:
        documents = [{"folder": str(folder), **dataclasses.asdict(proof)} for folder, proof in proven.items()]
        print(to_json({"seconds": seconds, "proofs": documents}))
    else:
        for folder, proof in proven.items():
            print(*proof_text(proof, folder if proof.passed else None), "", sep="\n")
        print(f"{passed} of {counted(len(proven), 'layout')} proven, in {seconds:,.0f} s")
    return Exit.DONE if passed == len(proven) else Exit.BUG


def show_proof(file: Path, json: bool) -> int:
    """Print the proof in a proof.json, or in the folder of one. Raises ConfigError if there is none."""
    folder = file if file.is_dir() else file.parent
    proof = proofs.read_proof(folder) if file in (folder, layout.PROOF.of(folder)) else None
    if proof is None:
        raise ConfigError(f"--show {file}: no {layout.PROOF.name} of this version; `titan verify JOB` makes one")
    print(to_json(dataclasses.asdict(proof)) if json else "\n".join(proof_text(proof, folder)))
    return Exit.DONE


def _of_runs(args: argparse.Namespace) -> list[tuple[Job, list[str], str]]:
    """Return the jobs of runs, each with its overrides and its name."""
    if cases := {case.name for case in whole_matrix()}.intersection(args.overrides):
        name = cases.pop()
        raise ConfigError(f"{name}: is a case of the matrix, not a run; titan verify --only {shlex.quote(name)}")
    jobs = []
    for cell in [cell for target in args.overrides for cell in choose(target, args.runs).cells]:
        import_modules(cell.directory)
        job = dataclasses.replace(load_job(cell.directory), paths=Paths(str(cell.directory.parent)))
        jobs.append((job, cell.overrides, cell.directory.name))
    return jobs


def _candidate(job: Job, overrides: list[str], name: str, most: int) -> Candidate:
    """Reduce a job, and list its pairs. Raises ConfigError if the job has no reduced form."""
    small = reduced(job, most)
    pairs = [list(job_pairs(job, small_job, _in_words(_degrees(small_job)))) for small_job in small]
    return Candidate(job, overrides, name or job.name, small, pairs)


def _degrees(job: Job) -> dict[str, int]:
    return {name: degree for name in (*DEGREES, "ep") if (degree := getattr(job.parallelism, name)) > 1}


def _in_words(degrees: dict[str, int]) -> str:
    return ", ".join(f"{name} {degree}" for name, degree in degrees.items()) or "one rank"


def _prove(candidates: list[Candidate], began: float) -> list[Proof]:
    """Run the pairs of all candidates, then train those that have passed. Pairs with the same number of
    ranks share one set of processes, and a job that several candidates share runs once. Returns a proof for each.
    """
    if not candidates:
        return []
    from . import job_runs

    # the samples are compared first, as this fails early if data files are missing
    orders = [job_runs.order_of_data(candidate.job, candidate.small[0]) for candidate in candidates]
    unique = {_key(each): each for candidate in candidates for of_small in candidate.pairs for each in of_small}
    outcomes = dict(zip(unique, job_runs.compared(unique.values()), strict=True))
    trained: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    new_proofs = []
    for candidate, data in zip(candidates, orders, strict=True):
        outcomes_of_small = [[outcomes[_key(each)] for each in of_small] for of_small in candidate.pairs]
        passed = all(outcome.passed for of_small in outcomes_of_small for outcome in of_small)
        print(f"{candidate.name}: learns {'' if passed else 'NOT '}as one process", file=sys.stderr, flush=True)
        if passed and (key := identity(candidate.small[0])) not in trained:
            trained[key] = job_runs.trained(candidate.small[0])
        resume, export = (
            trained[key]
            if passed
            else ({"passed": None, "reason": "not run, as the layout learns something else"},) * 2
        )
        new_proofs.append(_proof(candidate, outcomes_of_small, data, resume, export, time.monotonic() - began))
    return new_proofs


def _key(pair: JobPair) -> tuple[str, str]:
    return identity(pair.job), repr((pair.case.base, pair.case.documents))


def _proof(
    candidate: Candidate,
    outcomes_of_small: list[list[Outcome]],
    data: dict[str, Any],
    resume: dict[str, Any],
    export: dict[str, Any],
    seconds: float,
) -> Proof:
    """Return the proof of a candidate."""
    from .judge import outcome_as_json

    job = candidate.job
    proven = all(outcome.passed for outcomes in outcomes_of_small for outcome in outcomes)
    parts = [
        {
            "ranks": world_size(small),
            "identity": identity(small),
            "changes": reduced_keys(job, small),
            "proofs": [*map(outcome_as_json, outcomes)],
        }
        for small, outcomes in zip(candidate.small, outcomes_of_small, strict=True)
    ]
    return Proof(
        passed=bool(proven and data["passed"] and resume["passed"] is True and export["passed"] is not False),
        name=candidate.name,
        layout=proofs.layout_hash(job),
        identity=identity(job),
        overrides=candidate.overrides,
        gpus=job.gpus,
        degrees=_degrees(job),
        rules=sum(map(len, RULES)),
        warnings=[*map(str, checks.warnings(job))],
        prediction=_prediction(job),
        reduced=parts,
        not_shown=list(_not_shown(candidate)),
        data=data,
        resume=resume,
        export=export,
        versions=versions(),
        code=proofs.digest_of_package(),
        commit=describe_code()["git_sha"],
        written=time.time(),
        seconds=seconds,
        job=to_dict(job),
    )


def _prediction(job: Job) -> dict[str, Any]:
    """Return what `titan plan` predicts for the job at full size, with the error band, or the reason why it predicts
    nothing.
    """
    if job.hardware.name == "unknown":
        return {"memory_gib": None, "reason": "hardware=unknown; name the device, as hardware=h100"}
    try:
        return predict.as_json(predict.predict(predict.on_nodes(job, job.gpus)))
    except NotPredictable as error:
        return {"memory_gib": None, "reason": str(error)}


def _not_shown(candidate: Candidate) -> Iterator[str]:
    """Yield what the reduced size cannot show."""
    job = candidate.job
    yield "kernels and streams of a GPU; the ranks compute on CPUs"
    if len(candidate.small) > 1:
        yield (
            "all techniques at once, as that needs more than eight ranks: every three of them together, "
            "the first three resumed"
        )
    if job.parallelism.async_tp:
        yield "parallelism.async_tp, which needs CUDA"
    if job.compile.name != "off":
        yield f"code that compile.backend={job.compile.backend} generates; aot_eager compiles the same graphs"
    if job.precision.converter:
        compiled = ", and compiled" if job.compile.name != "off" else ""
        yield f"the hardware's {job.precision.converter}: it is emulated with float32 between the linears{compiled}"


def _write(folder: Path, proof: Proof) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        layout.PROOF.write(folder, dataclasses.asdict(proof))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error


def proof_text(proof: Proof, folder: Path | None) -> Iterator[str]:
    """Yield the lines that show a proof; `folder` is where it lies, if it does."""
    yield f"{proof.name}: {'proven' if proof.passed else 'NOT PROVEN'}"
    about = {
        "layout": f"{proof.layout}: {counted(proof.gpus, 'rank')}, {_in_words(proof.degrees)}; {proof.rules} rules kept",
        "predicted": _prediction_text(proof.prediction),
        "file": str(layout.PROOF.of(folder)) if folder else "none is written",
    }
    for small in proof.reduced:
        changes = [f"{key} {before} -> {after}" for key, (before, after) in sorted(small["changes"].items())]
        more = [f"and {len(changes) - CHANGES_SHOWN} more"] if len(changes) > CHANGES_SHOWN else []
        about[f"{small['ranks']} ranks"] = "; ".join([*changes[:CHANGES_SHOWN], *more])
    yield from (f"  {title:<11}{line}" for title, line in about.items())
    for case in (case for small in proof.reduced for case in small["proofs"]):
        yield f"  {_mark(case['passed'])}  {case['name']}: {_differences(case)}"
    data, resume, export = proof.data, proof.resume, proof.export
    yield f"  {_mark(data['passed'])}  data: {data['steps']} steps of {data['source']}, in the order of one process{_why(data)}"
    if resume.get("killed_at_step"):
        at = f"at step {resume['killed_at_step']}, resumed from {resume['carried_on_from_step']}, {resume['steps']} steps"
        yield f"  {_mark(resume['passed'])}  resume: killed {at}; bits of an undisturbed run{_why(resume)}"
    else:
        yield f"  {_mark(resume['passed'])}  resume{_why(resume)}"
    yield f"  {_mark(export['passed'])}  export and import: bits of {counted(export.get('tensors', 0), 'tensor')}{_why(export)}"
    yield from (f"  warning: {line}" for line in proof.warnings)
    yield from (f"  not shown: {line}" for line in proof.not_shown)


def _prediction_text(prediction: dict[str, Any]) -> str:
    """Return the prediction that a proof holds, in one line."""
    if prediction.get("memory_gib") is None:
        return f"nothing: {prediction['reason']}"
    low, high = prediction["memory_gib_band"]
    memory = f"{prediction['memory_gib']:,.1f} GiB ({low:,.1f} to {high:,.1f}) on {prediction['hardware']}, fits: {prediction['fits']}"
    if not prediction["tokens_per_second"]:
        return memory
    low, high = prediction["tokens_per_second_band"]
    return f"{memory}; {prediction['tokens_per_second']:,.0f} tokens/s per device ({low:,.0f} to {high:,.0f})"


def _differences(case: dict[str, Any]) -> str:
    """Return in words how far a case is from one process, and what is not equal though it must be."""
    parts = [f"{name} {_number(case[name]['difference'])} of {case[name]['bound']:g}" for name in COLUMNS]
    if case["band"] is not None:
        parts.append(f"{_number(case['band'])} of the measured band")
    parts += [f"{case[field]} {title}" for title, field in EXACT.items() if case[field]]
    return ", ".join(parts) + ("" if case["passed"] else f"; worst: {case['worst']}")


def _mark(passed: bool | None) -> str:
    return {True: "yes", False: "NO ", None: "-  "}[passed]


def _why(part: dict[str, Any]) -> str:
    return f" ({part['reason']})" if part.get("reason") else "" if part["passed"] else " (not the same bits)"


def _number(value: float | None) -> str:
    return "inf" if value is None else f"{value:.1e}"
