"""What each rank of a pipeline does when: torch's own order of actions, played with a forward of 1, a backward of 2 and halves of 1.

torch is asked in a process of its own, since a report imports none.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import titan_hydra
from titan_hydra.config.pipeline import TIME, Action, play

from .style import LIGHT, figure, short
from .table import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = {"F": ("blue", "paleblue"), "B": ("orange", "paleorange"), "I": ("orange", "paleorange"), "W": ("green", "palegreen")}
NAMES = {"F": "forward", "B": "backward", "I": "backward: inputs", "W": "backward: weights"}


@dataclass(frozen=True)
class Pipeline:
    """One schedule, played: for each rank (start, action) in order."""

    title: str
    stages: int
    ranks: list[list[tuple[float, Action]]]

    @property
    def end(self) -> float:
        return max(start + TIME[kind] for played in self.ranks for start, (_, kind, _) in played)

    @property
    def idle(self) -> float:
        """Share of all ranks' time in which they wait: the bubble."""
        busy = sum(TIME[kind] for played in self.ranks for _, (_, kind, _) in played)
        return 1 - busy / (self.end * len(self.ranks))


def pipelines(report: Report) -> list[Pipeline]:
    """The schedules of the cells with pipeline parallelism, each once, named after all cells that run it."""
    groups: dict[tuple, list] = {}
    for row in report.rows:
        if row.cell.config.get("parallelism.pp", 1) > 1:
            keys = ("pp_schedule.name", "pp_schedule.csv", "pp_schedule.stages_per_rank", "pp_schedule.microbatches", "parallelism.pp",
                    "data.local_batch")
            groups.setdefault(tuple(row.cell.config[key] for key in keys), []).append(row)
    found = []
    orders = ask([str(rows[0].cell.directory / "config.json") for rows in groups.values()])
    for rows, actions in zip(groups.values(), orders, strict=True):
        if actions is None:
            continue
        stages = 1 + max(stage for rank in actions for stage, _, _ in rank)
        title = f"{rows[0].cell.config['pp_schedule.name']}: {', '.join(row.label for row in rows)}"
        found.append(Pipeline(title, stages, play(actions, stages)))
    return found


def ask(configs: list[str]) -> list[list[list[Action]] | None]:
    """For each configuration the order of actions of each rank from torch; None where it cannot be had: no file, no torch."""
    if not configs:
        return []
    try:
        command = [sys.executable, "-m", "titan_hydra.parallel.order", *configs]
        paths = filter(None, [str(Path(titan_hydra.__file__).parents[1]), os.environ.get("PYTHONPATH")])
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, env=env).stdout
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no pipeline's timeline: {(getattr(error, 'stderr', None) or str(error)).strip().splitlines()[-1]}", file=sys.stderr)
        return [None] * len(configs)
    return [order and [[tuple(action) for action in rank] for rank in order] for order in json.loads(out)]


def draw(pipeline: Pipeline) -> Figure:
    """A row a rank, a box an action with its microbatch; later chunks of a rank are fainter, waiting is empty."""
    count = len(pipeline.ranks)
    drawn, axes = figure(height=1.5 + 0.34 * count)
    width = 7.2 * 72 * 0.88 / pipeline.end  # points of one unit of time
    for rank, played in enumerate(pipeline.ranks):
        axes.barh(rank, pipeline.end, height=0.8, color=LIGHT["wash"], zorder=0)
        chunks = sorted({stage for _, (stage, _, _) in played})
        for start, (stage, kind, number) in played:
            shades = COLOURS[kind]
            shade = shades[min(chunks.index(stage), len(shades) - 1)]
            axes.barh(rank, TIME[kind], left=start, height=0.8, color=LIGHT[shade], edgecolor=LIGHT["edge"], linewidth=0.5)
            if width * TIME[kind] > 6 * len(str(number)):
                axes.text(start + TIME[kind] / 2, rank, str(number), ha="center", va="center", fontsize=7,
                          color=LIGHT["onpale" if shade.startswith("pale") else "onfull"])
    kinds = [kind for kind in NAMES if any(kind == action[1] for played in pipeline.ranks for _, action in played)]
    place = 0.0
    for kind in kinds:
        axes.annotate(f"\N{BLACK SQUARE} {NAMES[kind]}", (0, 0), (place, -6), xycoords="axes fraction", textcoords="offset points",
                      va="top", fontsize=8.5, color=LIGHT[COLOURS[kind][0]])
        place += 5.4 * len(NAMES[kind]) + 22
    note = f"idle {pipeline.idle:.0%}" + (", a rank's later stages fainter" if pipeline.stages > count else "")
    axes.text(1, 1.03, note, transform=axes.transAxes, ha="right", color=LIGHT["soft"], fontsize=8.5)
    axes.set_yticks(range(count), [f"rank {rank}" for rank in range(count)], color=LIGHT["ink"])
    axes.set_ylim(count - 0.45, -0.55)
    axes.set_xlim(0, pipeline.end)
    axes.set_xticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.set_title(short(pipeline.title, 70), loc="left")
    axes.set_xlabel(" ")  # room for the names of the colours
    return drawn
