"""Draw the timeline of a run that changed its layout: how many ranks trained when, and the steps that they made.

    python benchmarks/elastic.py RUN FOLDER

Writes elastic.png and elastic.svg to FOLDER, and prints a line for each start of the run.
"""

import re
import sys
from pathlib import Path

import matplotlib

from titan_hydra.report.plots import figure, save_figure
from titan_hydra.report.style import settings
from titan_hydra.runs import layout
from titan_hydra.runs.useful import goodput_of


def attempts_of(run: Path) -> list[tuple[float, float, int, int]]:
    """Return (start, last sign of life, ranks, last step) of each attempt in which a rank has started."""
    found = []
    for attempt in layout.ATTEMPT.all(run).values():
        records, status = layout.RANK.read_all(attempt), layout.STATUS.read(attempt)
        starts = [record["started"] for record in records.values() if "started" in record]
        if starts:
            last = max(
                [status.get("time", 0.0), *(record.get("ended", 0.0) for record in records.values()), max(starts)]
            )
            (ranks,) = re.findall(r"layout of \d+ nodes, (\d+) ranks", layout.JOB_LOG.of(attempt).read_text())
            found.append((min(starts), last, int(ranks), status.get("step", 0)))
    return found


def main(run: Path, folder: Path) -> None:
    attempts = attempts_of(run)
    zero = attempts[0][0]
    for start, end, ranks, step in attempts:
        print(f"{(start - zero) / 60:6.1f} to {(end - zero) / 60:6.1f} min  {ranks} ranks, up to step {step}")
    print(f"goodput {goodput_of(run, layout.METRICS.rows(run)[0]):.1%}")
    with matplotlib.rc_context(settings("plan")):
        drawn, axes = figure(3.2)
        for start, end, ranks, _ in attempts:
            axes.bar((start - zero) / 60, ranks, (end - start) / 60, align="edge", color="C0", alpha=0.5)
        axes.set_ylabel("ranks")
        axes.set_xlabel("minutes since the first start", loc="right")
        steps = axes.twinx()
        steps.plot([(end - zero) / 60 for _, end, _, _ in attempts], [step for *_, step in attempts], "C1", marker="o")
        steps.set_ylabel("steps done")
        axes.set_title("ranks of each start (bars), and steps (line)", loc="left")
        print(*save_figure(drawn, folder, "elastic"), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
