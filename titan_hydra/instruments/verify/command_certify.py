"""`titan certify`: make a certificate for the layout of each cell of a command line, or add a run's figures to the
certificate of the run's layout.

The checks run at a reduced size: the layout must give the results of a single process, a killed run must resume, and
the weights must survive export and import. A certificate is written only if no check has failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import to_json
from titan_hydra.core.base.versions import versions
from titan_hydra.core.job.config import Job, identity, to_dict
from titan_hydra.core.job.config.fault import bad_value, counted
from titan_hydra.core.job.config.files import write_text
from titan_hydra.core.job.config.operation import Paths
from titan_hydra.core.job.ranks import DEGREES, world_size
from titan_hydra.core.job.rules import checks
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import describe_code
from titan_hydra.core.job.run.modules import import_modules
from titan_hydra.core.train.worker import load_job
from titan_hydra.experiments.compose.compose import compose_cells
from titan_hydra.experiments.plan import predict
from titan_hydra.experiments.plan.shape import NotPredictable
from titan_hydra.experiments.runs import cards
from titan_hydra.experiments.runs.view import add_runs, choose
from titan_hydra.instruments.verify.card_page import card_page

from .command_verify import outcome_as_json

if TYPE_CHECKING:
    from titan_hydra.instruments.verify.judge import Outcome
    from titan_hydra.instruments.verify.reduce import Proof

MOST = 4  # default for the maximum number of ranks of a reduced job
# all sets of rules except those about this machine, as no job of full size is started
RULES = (
    checks.KEYS,
    checks.RANKS,
    checks.VALUES,
    checks.LAYOUT,
    checks.RECIPE,
)
STEPS_OF_DATA = 3  # number of steps whose samples are compared


@dataclasses.dataclass
class Candidate:
    """A cell to be certified: its job, the jobs of reduced size (`small`), and for each of these a list of proofs."""

    job: Job
    overrides: list[str]
    name: str
    small: list[Job]
    proofs: list[list[Proof]]

    @property
    def every_proof(self) -> list[Proof]:
        return [proof for own in self.proofs for proof in own]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="overrides of the job, as for launch.py, including +sweeps=NAME,...; or RUN...: add the figures of these "
        "runs to their certificates",
    )
    parser.add_argument(
        "--config-dir",
        type=Path,
        action="append",
        metavar="DIR",
        help="a folder with your own options, as for launch.py",
    )
    parser.add_argument(
        "--ranks",
        type=int,
        default=MOST,
        metavar="N",
        help="maximum number of ranks of a reduced job, 2 to 8 (default: 4)",
    )
    parser.add_argument(
        "--again", action="store_true", help="also certify layouts that already have a certificate for this code"
    )
    parser.add_argument("--json", action="store_true", help="print the certificates as JSON")
    add_runs(parser)


def main(args: argparse.Namespace) -> int:
    """Certify the cells, or add the figures of runs. Returns 0 if all cells or runs have a certificate, 1 if a check
    has failed, and 2 if a job breaks a rule or has no reduced form.
    """
    if not 2 <= args.ranks <= 8:
        raise bad_value("--ranks", args.ranks, "the ranks of a reduced job", 2, 4, 8)
    if args.overrides and not any("=" in word for word in args.overrides):
        return add_figures(args)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # one thread per rank, as there may be more ranks than cores
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # hides the GPUs: the ranks compute on CPUs
    began = time.monotonic()
    cells = compose_cells(args.overrides, args.config_dir)
    if faults := [f"{name or 'the job'}: {fault}" for job, _, name in cells for fault in checks.check(job, RULES)]:
        print(*dict.fromkeys(faults), sep="\n", file=sys.stderr)
        return Exit.CONFIG
    known = {cards.folder_of_card(job): cards.read_card(job) for job, _, _ in cells}
    wanted = {folder: cell for cell in cells if args.again or not known[folder := cards.folder_of_card(cell[0])]}
    made = dict(zip(wanted, certified([subject(*cell, args.ranks) for cell in wanted.values()], began), strict=True))
    for folder, card in made.items():
        if card["passed"]:
            write_card(folder, card)
    show_cards(known | made, args.json, time.monotonic() - began)
    return Exit.DONE if all(card["passed"] for card in (known | made).values()) else Exit.BUG


def subject(job: Job, overrides: list[str], name: str, most: int) -> Candidate:
    """Reduce a job, and list the proofs that it needs. Raises ConfigError if the job has no reduced form."""
    from titan_hydra.instruments.verify.reduce import proofs, reduced

    small = reduced(job, most)
    return Candidate(
        job, overrides, name or job.name, small, [list(proofs(job, one, degrees_in_words(one))) for one in small]
    )


def degrees_in_words(job: Job) -> str:
    """Return in words the degrees that are above one, such as `dp_shard 2, tp 2`."""
    return ", ".join(f"{name} {degree}" for name, degree in degrees_of(job).items()) or "one rank"


def degrees_of(job: Job) -> dict[str, int]:
    return {name: degree for name in (*DEGREES, "ep") if (degree := getattr(job.parallelism, name)) > 1}


def certified(subjects: list[Candidate], began: float) -> list[dict[str, Any]]:
    """Run the proofs of all subjects, then train those that have passed. Proofs with the same number of ranks share one
    set of processes, and a job that several subjects share runs once. Returns a certificate for each subject.
    """
    if not subjects:
        return []
    from titan_hydra.instruments.verify.certificate import prove_all

    # the samples are compared first, as this fails early if data files are missing
    orders = [order_of_data(one) for one in subjects]
    unique = {_key(proof): proof for one in subjects for proof in one.every_proof}
    outcomes = dict(zip(unique, prove_all(unique.values()), strict=True))
    trained: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    made = []
    for one, data in zip(subjects, orders, strict=True):
        found = [[outcomes[_key(proof)] for proof in own] for own in one.proofs]
        passed = all(outcome.passed for own in found for outcome in own)
        print(f"{one.name}: {'proven' if passed else 'NOT PROVEN'}", file=sys.stderr, flush=True)
        if passed and (key := identity(one.small[0])) not in trained:
            trained[key] = train_reduced(one.small[0])
        resume, export = trained[key] if passed else ({"passed": None, "reason": "not run, as a proof has failed"},) * 2
        made.append(card_of(one, found, data, resume, export) | {"seconds": time.monotonic() - began})
    return made


def _key(proof: Proof) -> tuple[str, str]:
    return identity(proof.job), repr((proof.case.base, proof.case.documents))


def train_reduced(job: Job) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train a reduced job without interruption, and again with a kill and a resume. Then export and import its weights."""
    from . import command_certify_run as certify_run

    with tempfile.TemporaryDirectory(prefix="certify-", ignore_cleanup_errors=True) as folder:
        resume, run = certify_run.killed_and_carried_on(job, Path(folder))
        if layout.RESULT.read(run).get("status") != "done":
            return resume, {"passed": None, "reason": "not done, as the run has failed"}
        return resume, certify_run.exported_and_imported(run, job, Path(folder))


def order_of_data(one: Candidate) -> dict[str, Any]:
    """Compare the samples of all data-parallel ranks with those of a single process. Raises ConfigError for missing
    files.
    """
    from titan_hydra.instruments.verify.certificate import misplaced
    from titan_hydra.instruments.verify.reduce import with_own_data

    own, reason = with_own_data(one.job, one.small[0])
    if wrong := misplaced(own, STEPS_OF_DATA):
        reason = f"not so at {wrong}"
    return {"passed": not wrong, "source": own.data.name, "steps": STEPS_OF_DATA, "reason": reason or None}


def card_of(
    one: Candidate, found: list[list[Outcome]], data: dict[str, Any], resume: dict[str, Any], export: dict[str, Any]
) -> dict[str, Any]:
    """Return the certificate of a subject as JSON values."""
    from titan_hydra.instruments.verify.reduce import reduced_keys

    job = one.job
    proven = all(outcome.passed for outcomes in found for outcome in outcomes)
    return {
        "passed": proven and data["passed"] and resume["passed"] is True and export["passed"] is not False,
        "name": one.name,
        "layout": cards.layout_hash(job),
        "identity": identity(job),
        "overrides": one.overrides,
        "gpus": job.gpus,
        "degrees": degrees_of(job),
        "rules": {"checked": sum(map(len, RULES)), "faults": [], "warnings": [*map(str, checks.warnings(job))]},
        "prediction": prediction_of(job),
        "reduced": [
            {
                "ranks": world_size(small),
                "identity": identity(small),
                "changes": reduced_keys(job, small),
                "proofs": [*map(outcome_as_json, outcomes)],
            }
            for small, outcomes in zip(one.small, found, strict=True)
        ],
        "not_shown": list(not_shown(one)),
        "data": data,
        "resume": resume,
        "export": export,
        "measured": [],
        "versions": versions(),
        "code": cards.digest_of_package(),
        "code_state": cards.code_state(describe_code()),
        "written": time.time(),
        "job": to_dict(job),
    }


def prediction_of(job: Job) -> dict[str, Any]:
    """Return what `titan plan` predicts for the job at full size, with the error band, or the reason why it predicts
    nothing.
    """
    if job.hardware.name == "unknown":
        return {"memory_gib": None, "reason": "hardware=unknown; name the device, as hardware=h100"}
    try:
        return predict.as_json(predict.predict(predict.on_nodes(job, job.gpus)))
    except NotPredictable as error:
        return {"memory_gib": None, "reason": str(error)}


def not_shown(one: Candidate) -> list[str]:
    """List what the reduced size cannot show."""
    job, lines = one.job, ["kernels and streams of a GPU; the ranks compute on CPUs"]
    if len(one.small) > 1:
        lines.append(
            "all techniques at once, as that needs more than eight ranks: every three of them together, the first three resumed"
        )
    if job.parallelism.async_tp:
        lines.append("parallelism.async_tp, which needs CUDA")
    if job.compile.name != "off":
        lines.append(f"code that compile.backend={job.compile.backend} generates; aot_eager compiles the same graphs")
    if job.precision.converter:
        compiled = ", and compiled" if job.compile.name != "off" else ""
        lines.append(
            f"the hardware's {job.precision.converter}: it is emulated with float32 between the linears{compiled}"
        )
    return lines


def write_card(folder: Path, card: dict[str, Any]) -> None:
    """Write a certificate as JSON, and as a page to read."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        layout.CARD.write(folder, card)
        write_text(layout.CARD_PAGE.of(folder), card_page(card))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}") from error


def show_cards(made: dict[Path, dict[str, Any]], json: bool, seconds: float) -> None:
    """Print a line for each certificate, and the checks that failed."""
    if json:
        print(
            to_json({"seconds": seconds, "cards": [{"folder": str(folder), **card} for folder, card in made.items()]})
        )
        return
    for folder, card in made.items():
        failed = [
            f"{proof['name']} ({proof['worst']})"
            for small in card["reduced"]
            for proof in small["proofs"]
            if not proof["passed"]
        ]
        failed += [
            f"{part} ({card[part]['reason'] or 'not the same bits'})"
            for part in ("data", "resume", "export")
            if card[part]["passed"] is False
        ]
        print(
            f"{card['name']}: {layout.CARD_PAGE.of(folder) if card['passed'] else 'NOT PASSED: ' + '; '.join(failed)}"
        )
    passed = sum(card["passed"] for card in made.values())
    print(f"{passed} of {counted(len(made), 'layout')} certified, in {seconds:,.0f} s")


def add_figures(args: argparse.Namespace) -> int:
    """Add what runs have measured to the certificates of their layouts. Returns 2 if a run is not done, or if its
    layout has no certificate for the run's code.
    """
    changed, faults = {}, []
    for cell in [cell for target in args.overrides for cell in choose(target, args.runs).cells]:
        import_modules(cell.directory)
        job = dataclasses.replace(load_job(cell.directory), paths=Paths(str(cell.directory.parent)))
        folder, measured = cards.folder_of_card(job), cards.measured_of(cell.directory)
        card = changed.get(folder) or cards.read_card(job)
        if not card:
            faults.append(f"{cell.directory.name}: its layout has no card {folder.name} of this code")
        elif not measured:
            faults.append(f"{cell.directory.name}: is not done, so it has measured nothing that counts")
        elif not cards.same_code(card, cell.directory):
            faults.append(
                f"{cell.directory.name}: another commit, or other uncommitted changes, than those of its card"
            )
        else:
            changed[folder] = cards.with_measured(card, measured)
    for folder, card in changed.items():
        write_card(folder, card)
    show_figures(changed, args.json)
    print(*faults, sep="\n", end="\n" if faults else "", file=sys.stderr)
    return Exit.CONFIG if faults else Exit.DONE


def show_figures(changed: dict[Path, dict[str, Any]], json: bool) -> None:
    """Print the certificates that have new figures."""
    if json:
        print(to_json({"cards": [{"folder": str(folder), **card} for folder, card in changed.items()]}))
    else:
        for folder, card in changed.items():
            print(f"{layout.CARD_PAGE.of(folder)}: {counted(len(card['measured']), 'run')} measured")
