"""Plant known faults one at a time in a copy of the package, and print which case or test found each fault:
`python -m tests.equivalence.mutants` (docs/lab/trial.md).
"""

import argparse
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict

from titan_hydra.core.base.errors import ConfigError, Exit
from titan_hydra.core.base.text import table, to_json
from titan_hydra.core.job.config import Fault
from titan_hydra.core.job.config.fault import counted, suggest

from . import corpus
from .mutant import Mutant
from .trial import Finding, Trial, counts_by_way

WAYS = {"quick": "quick cases", "matrix": "whole matrix", "tests": "tests alone", "missed": "missed"}


def main(words: list[str]) -> int:
    """Parse the options and run the trial. An option without effect or match is one line, and the exit status is 2."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.equivalence.mutants", description=__doc__.split(":\n")[0] + "."
    )
    parser.add_argument(
        "--only", metavar="NAME", help="only mutants whose name contains this text, or that need this technique"
    )
    parser.add_argument("--quick", action="store_true", help="run only the short cases")
    parser.add_argument("--list", action="store_true", help="print the names of the mutants without planting them")
    parser.add_argument("--json", action="store_true", help="print JSON for scripts: each mutant with what found it")
    try:
        return run_trial(parser.parse_args(words))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return error.status


def run_trial(args: argparse.Namespace) -> int:
    """Run the trial. Returns 0 if every mutant was found and all cases and tests pass without a mutant, else 1."""
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    subjects = {mutant.name: subject for subject, mutants in corpus.SUBJECTS.items() for mutant in mutants}
    chosen = _chosen(args.only or "", [mutant for mutants in corpus.SUBJECTS.values() for mutant in mutants])
    if args.list:
        names = [{"name": mutant.name, "needs": mutant.needs} for mutant in chosen]
        print(to_json(names) if args.json else "\n".join(f"{mutant.needs:<24}{mutant.name}" for mutant in chosen))
        return Exit.DONE
    trial = Trial(args.quick, lambda line: print(line, file=sys.stderr, flush=True))
    findings = []
    for finding in trial.run(chosen):
        findings.append(finding)
        print(line_of(finding), file=sys.stderr if args.json else sys.stdout, flush=True)
    if args.json:
        rows = [
            asdict(finding.mutant) | {"subject": subjects[finding.mutant.name]} | _found(finding)
            for finding in findings
        ]
        print(to_json({"mutants": rows, "summary": counts_by_way(findings)}))
    else:
        print("", *_summary(findings, subjects), sep="\n")
        if left := len(chosen) - len(findings):
            print(f"{counted(left, 'mutant')} not tried: no case that the default suite runs could notice them")
    return Exit.DONE if all(finding.found for finding in findings) and all(trial.sound.values()) else Exit.BUG


def line_of(finding: Finding) -> str:
    """Return a line about a mutant: which case or test found it, in which column, how far beyond the bound; and the
    seconds.
    """
    how = f"{finding.times:.2g} times its bound" if finding.times < float("inf") else "no number"
    what = f"{finding.column} of {finding.where}: {how}" if finding.where else "no case ran"
    what = finding.where if finding.by == "tests" else what
    return (
        f"{WAYS[finding.by] if finding.found else 'MISSED':<13}{finding.mutant.name}; {what}; {finding.seconds:.0f} s"
    )


def _found(finding: Finding) -> dict[str, object]:
    times = finding.times if finding.times < float("inf") else None
    return {
        "found_by": finding.by,
        "where": finding.where,
        "column": finding.column,
        "times": times,
        "seconds": finding.seconds,
    }


def _summary(findings: Iterable[Finding], subjects: dict[str, str]) -> list[str]:
    header = ("subject", "mutants", *WAYS.values())
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(subjects[finding.mutant.name], []).append(finding)
        groups.setdefault("all", [])
    groups["all"] = [finding for own in groups.values() for finding in own]
    rest = {name: own for name, own in groups.items() if name != "all"} | {"all": groups["all"]}
    rows = [(name, str(len(own)), *map(str, counts_by_way(own).values())) for name, own in rest.items()]
    return table(header, rows, header[1:], ("subject",), [{} for _ in rows])


def _chosen(text: str, mutants: list[Mutant]) -> list[Mutant]:
    """Return the mutants whose name or technique contains a text. Raises ConfigError if there are none."""
    chosen = [mutant for mutant in mutants if text in mutant.name or text in mutant.needs.split(", ")]
    if not chosen:
        names = [mutant.name for mutant in mutants]
        raise ConfigError(str(Fault("--only", text, "no such mutant; --list names them", legal=suggest(text, names))))
    return chosen


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
