"""Measure a search against a full grid, and kill its driver at random: python benchmarks/search.py [--seeds 5] [--kills 20]

For each seed, a grid of 64 cells (8 learning rates x 8 weight decays) and a search of 16 trials with halving over the same
box train the same tiny model with the same seed. The search passes if its best held-out loss is within 1 % of the grid's
best, for at most a third of the grid's steps. Then one search runs undisturbed, and again in another folder with its
driver killed at random moments: both must have the same table, and each run must belong to one trial.

Every command line runs in a process that is forked from this one, so that torch is imported once.
"""

import argparse
import contextlib
import json
import multiprocessing as mp
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

STEPS, TRIALS = 54, 16
RATES = [1e-3 * 2**power for power in range(8)]
DECAYS = [0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
TINY = [
    *("debug=tiny", "precision=fp32", "cluster=inline", "model.dim=32", "model.n_layers=1", "data.seq_len=32"),
    *("validation=on", "validation.steps=8", "validation.interval=1000", "metrics.log_every=1000"),
    *("lr_scheduler=constant", "lr_scheduler.warmup_steps=4", "checkpoint.interval=0", f"steps={STEPS}"),
]
GRID = [
    f"optimizer.lr={','.join(f'{rate:g}' for rate in RATES)}",
    f"optimizer.weight_decay={','.join(f'{decay:g}' for decay in DECAYS)}",
]
SEARCH = [
    *("search=optuna", "search.pruner=halving", f"search.trials={TRIALS}", "search.first_steps=18", "search.confirm=0"),
    f"optimizer.lr=tag(log,interval({RATES[0]:g},{RATES[-1]:g}))",
    f"optimizer.weight_decay=interval({DECAYS[0]:g},{DECAYS[-1]:g})",
]


def start(folder: Path, *words: str) -> mp.Process:
    """Start launch.py -m in a folder, as the leader of a session of its own."""
    process = mp.get_context("fork").Process(target=launched, args=(folder, list(words)))
    process.start()
    return process


def launched(folder: Path, words: list[str]) -> None:
    from titan_hydra.experiments.launch.main import main

    os.setsid()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    sys.argv = ["launch.py", "-m", *words]
    os._exit(main())


def finished(folder: Path, *words: str) -> None:
    process = start(folder, *words)
    process.join()
    if process.exitcode:
        raise SystemExit(f"status {process.exitcode}: see {folder}/log")


def found(folder: Path):
    """Return the summary of the one search in a folder."""
    from titan_hydra.instruments.search.summary import summary_of

    (sweep,) = (folder / "runs/_sweeps").glob("*-search-*")
    return summary_of(sweep)


def against_the_grid(place: Path, seed: int) -> bool:
    """Run the grid and the search with a seed, and print how they compare."""
    folder = place / f"seed{seed}"
    finished(folder / "grid", *TINY, *GRID, f"seed={seed}", "checkpoint=off")
    results = [json.loads(file.read_text()) for file in (folder / "grid").glob("runs/*/result.json")]
    losses = sorted(one["validation_loss"] for one in results if one["validation_loss"] is not None)
    finished(folder / "search", *TINY, *SEARCH, f"seed={seed}", f"search.seed={seed}")
    summary = found(folder / "search")
    best, (made, _) = summary.best[0].objectives[0], summary.steps
    share, gap = made / (64 * STEPS), best / losses[0] - 1
    good = gap <= 0.01 and share <= 1 / 3 and len(losses) > 60
    full = sum(STEPS in trial.values for trial in summary.trials)
    print(
        f"seed {seed}: grid {losses[0]:.4f} (median {losses[len(losses) // 2]:.4f}, {len(losses)} cells), search {best:.4f} "
        f"({gap:+.2%}), {made:,} of {64 * STEPS:,} steps ({share:.1%}), {full} of {len(summary.trials)} trials to the end: "
        f"{'pass' if good else 'FAIL'}",
        flush=True,
    )
    shutil.rmtree(folder)
    return good


def table(folder: Path) -> list:
    return [(one.number, one.overrides, one.state, one.values) for one in found(folder).trials]


def begins(process: mp.Process, log: Path, before: int) -> None:
    """Wait until a driver has read its journal: a kill before that hits nothing."""
    while process.exitcode is None and not (log.exists() and b"so far" in log.read_bytes()[before:]):
        process.join(0.02)


def kills(place: Path, count: int) -> bool:
    """Kill the driver of a search at random moments of its work, and compare with the undisturbed search."""
    line = [*TINY, *SEARCH, "search.seed=7"]
    folder, draw, done, lives = place / "killed", random.Random(0), 0, []
    process = start(place / "whole", *line)
    begins(process, place / "whole/log", 0)
    began = time.monotonic()
    process.join()
    usual = time.monotonic() - began
    while done < count:
        before = (folder / "log").stat().st_size if (folder / "log").exists() else 0
        process = start(folder, *line)
        begins(process, folder / "log", before)
        lives.append(draw.uniform(0, 2 * usual / count))
        process.join(lives[-1])
        if process.exitcode is not None:
            break  # the search has ended
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        done += 1
    finished(folder, *line)
    one, other = table(place / "whole"), table(folder)
    runs = sorted(path.parent.name for path in folder.glob("runs/*/config.json"))
    named = sorted(run for trial in found(folder).trials for run in trial.runs.values())
    attempts = sum(1 for _ in folder.glob("runs/*/attempts/[0-9]*"))
    good = one == other and runs == named and len(named) == len(set(named))
    print(
        f"{done} kills, {attempts - len(runs)} of them during a run: {len(other)} trials, {len(runs)} runs; the table is "
        f"{'the same' if one == other else 'ANOTHER'}; {'no' if runs == named else 'SOME'} run without its one trial: "
        f"{'pass' if good else 'FAIL'}",
        flush=True,
    )
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "search-benchmark"))
    args = parser.parse_args()
    import optuna  # noqa: F401

    import titan_hydra.core.train.loop  # noqa: F401  (before the forks)

    shutil.rmtree(args.folder, ignore_errors=True)
    good = kills(args.folder / "kills", args.kills) if args.kills else True
    passed = sum(against_the_grid(args.folder, seed) for seed in range(args.seeds))
    print(f"{passed} of {args.seeds} seeds pass")
    return 0 if good and passed >= args.seeds * 0.8 else 1


if __name__ == "__main__":
    sys.exit(main())
