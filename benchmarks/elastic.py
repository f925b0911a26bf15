"""Draw the timeline of an elastic run: how many ranks each of its starts had, and the steps that they made.

    python benchmarks/elastic.py RUN FOLDER
    python benchmarks/elastic.py LOSSES FOLDER
    python benchmarks/elastic.py LOSSES FOLDER AWAY

The second line first runs such a job on the SLURM of tests/slurm: eight nodes of this machine, of which LOSSES are lost at
random, up to three at once, and come back at random. Its ranks do not train: they count steps of half a second and save
the count every ten steps, so that the drill shows what SLURM and the batch script do, and costs no computation. Writes
elastic.png and elastic.svg to FOLDER, and prints a line for each start and for each step that was counted twice.

The third line runs a fixed and an elastic job of this kind. Each loses one node LOSSES times, for AWAY seconds; the line
prints the share of the time in which the job did useful work, where a step on 7 of 8 nodes counts as 7/8 of a step.
"""

import random
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.stretches import goodput_of
from titan_hydra.experiments.report.plots import figure, save_figure
from titan_hydra.experiments.report.style import settings

COUNTER = r"""#!/bin/bash
run="$4" attempt="$5" rank="$SLURM_PROCID" here="$4/attempts/$5"
echo "{\"pid\": 1, \"host\": \"$(hostname)\", \"born\": null, \"started\": $(date +%s.%N)}" >"$here/.$rank"
mv "$here/.$rank" "$here/rank_$rank.json"
[ "$rank" = 0 ] || { trap 'exit 75' USR2; while :; do sleep 5 & wait $!; done; }
step=$(cat "$run/saved" 2>/dev/null || echo 0) stop=
trap 'stop=1' USR2
while :; do
    sleep 0.5 & wait $!
    step=$((step + 1)); echo "$attempt $step" >>"$run/steps"
    echo "{\"step\": $step, \"phase\": \"data\", \"time\": $(date +%s.%N)}" >"$here/.s" && mv "$here/.s" "$here/status.json"
    if [ $((step % 10)) = 0 ] || [ -n "$stop" ]; then echo $step >"$run/.saved" && mv "$run/.saved" "$run/saved"; fi
    if [ -n "$stop" ]; then echo agreed >"$here/stopped"; exit 75; fi
done
"""


def submitted(user: Any, *words: str) -> Path:
    """Submit a job whose ranks count steps instead of training. Return its run directory."""
    counter = user.folder / "counter"
    counter.write_text(COUNTER)
    counter.chmod(0o755)
    user.submit(*words, f"cluster.python={counter}")
    (run,) = user.cells()
    return run


def drill(losses: int, folder: Path) -> Path:
    """Lose so many nodes of a run, and return a copy of its directory."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.slurm.conftest import desk, running
    from tests.slurm.test_elastic import LINE, newest

    chance, lost, every = random.Random(5), 0, {f"node{number}" for number in range(8)}
    with running(nodes=8) as cluster, desk(cluster, Path(tempfile.mkdtemp())) as user:
        run = submitted(user, *LINE, "steps=300", "cluster.grow_minutes=1")
        user.wait(lambda: user.step(run, newest(run)) > 10)
        up, began = set(every), time.time()
        while lost < losses:
            before, most = newest(run), min(len(up) - 4, losses - lost)
            if gone := chance.sample(sorted(up), min(chance.choice((1, 1, 2, 2, 3)), most)):
                lost, up = lost + len(gone), up - {*gone}
                cluster.manage("crash", *gone)
                user.wait(lambda before=before: newest(run) > before and user.step(run, newest(run)) > 2, 240)
                print(f"{time.time() - began:5.0f} s  lost {', '.join(gone)}: attempt {newest(run)}", flush=True)
            if up != every and (chance.random() < 0.6 or len(up) < 5):
                back = chance.sample(sorted(every - up), chance.randint(1, len(every - up)))
                cluster.manage("boot", *back)
                up |= {*back}
        if up != every:
            cluster.manage("boot", *(every - up))
        user.wait(lambda: (run / "config.json").read_text().count('"gpus": 8') and user.step(run, newest(run)) > 0, 240)
        print(
            f"at the end {user.job(run, newest(run))['NumNodes']} nodes, {user.job(run, newest(run))['Restarts']} requeues"
        )
        steps = [int(line.split()[1]) for line in (run / "steps").read_text().splitlines()]
        print(f"{len(steps)} steps counted, {len({*steps})} different ones, up to {max(steps)}")
        return Path(shutil.copytree(run, folder / run.name, dirs_exist_ok=True))


def useful_share(words: list[str], losses: int, away: float) -> str:
    """Run a job that loses one node so many times. Return the share of the time in which it did useful work."""
    from tests.slurm.conftest import desk, running
    from tests.slurm.test_elastic import newest

    chance = random.Random(5)
    with running(nodes=8) as cluster, desk(cluster, Path(tempfile.mkdtemp())) as user:
        run = submitted(user, *words, "steps=3000")

        def whole_again(before: int) -> bool:
            attempt = newest(run)
            return attempt > before and user.step(run, attempt) > 0 and user.job(run, attempt)["NumNodes"] == "8"

        user.wait(lambda: whole_again(0))
        began = time.time()
        for _ in range(losses):
            time.sleep(60)
            gone, before = f"node{chance.randrange(8)}", newest(run)
            cluster.manage("crash", gone)
            time.sleep(away)
            cluster.manage("boot", gone)
            user.wait(lambda before=before: whole_again(before), 400)
        time.sleep(60)
        seconds = time.time() - began
        nodes = {}  # of each attempt
        for number, attempt in layout.ATTEMPT.all(run).items():
            log = layout.JOB_LOG.of(attempt)
            found = re.findall(r"layout of (\d+) nodes", log.read_text()) if log.exists() else []
            nodes[number] = int(found[0]) if found else 8
        rows = [line.split() for line in (run / "steps").read_text().splitlines()]
        last = {step: int(attempt) for attempt, step in rows}  # the attempt that counted a step last
        useful = sum(nodes[attempt] / 8 for attempt in last.values())
        starts = ", ".join(map(str, nodes.values()))
        return f"{len(rows)} steps, {useful:.1f} useful, {seconds:.0f} s, nodes {starts}: {useful * 0.5 / seconds:.1%}"


def compare(losses: int, away: float) -> None:
    """Print the useful share of the time of a fixed and of an elastic job that lose the same nodes."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.slurm.test_elastic import LINE

    fixed = [word for word in LINE if not word.startswith("elastic=")]
    for kind, words in (("fixed", fixed), ("elastic", [*LINE, "cluster.grow_minutes=1"])):
        print(f"{kind}: {useful_share(words, losses, away)}", flush=True)


def attempts_of(run: Path) -> list[tuple[float, float, int, int]]:
    """Return (start, last sign of life, ranks, last step) of each attempt that made a step."""
    found = []
    for attempt in layout.ATTEMPT.all(run).values():
        records, status = layout.RANK.read_all(attempt), layout.STATUS.read(attempt)
        starts = [record["started"] for record in records.values() if "started" in record]
        if starts and status:
            ends = [record.get("ended", 0.0) for record in records.values()]
            (ranks,) = re.findall(r"layout of \d+ nodes, (\d+) ranks", layout.JOB_LOG.of(attempt).read_text())
            found.append((min(starts), max(*starts, *ends, status.get("time", 0.0)), int(ranks), status["step"]))
    return found


def draw(run: Path, folder: Path) -> None:
    """Print a line for each start, and draw them all."""
    attempts = attempts_of(run)
    zero = attempts[0][0]
    for start, end, ranks, step in attempts:
        print(f"{(start - zero) / 60:6.1f} to {(end - zero) / 60:6.1f} min  {ranks} ranks, up to step {step}")
    if (goodput := goodput_of(run, layout.METRICS.rows(run)[0])) is not None:
        print(f"goodput {goodput:.1%}")
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
    what, folder = sys.argv[1], Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    if len(sys.argv) == 4:
        sys.exit(compare(int(what), float(sys.argv[3])))
    draw(drill(int(what), folder) if what.isdecimal() else Path(what), folder)
