"""The timeline of each pipeline rank. It has the actions that a run recorded in schedule.json. In the simulation, a
forward lasts 1 unit of time, a backward 2, and each half of a backward 1.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from titan_hydra.core.job.pipeline import Action
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.schedules import TIME, play

from .style import LIGHT, short
from .table import Report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {
    "F": ("blue", "paleblue"),
    "B": ("orange", "paleorange"),
    "I": ("orange", "paleorange"),
    "W": ("green", "palegreen"),
}
NAMES = {"F": "forward", "B": "backward", "I": "backward: inputs", "W": "backward: weights"}


@dataclass(frozen=True)
class Timeline:
    """A simulated schedule."""

    title: str
    stages: int
    ranks: list[list[tuple[float, Action]]]  # for each rank, pairs (start, action) in order

    @property
    def end(self) -> float:
        return max(start + TIME[kind] for played in self.ranks for start, (_, kind, _) in played)

    @property
    def boxes(self) -> list[Box]:
        """The boxes of all actions, coloured by kind. Actions of a rank's second and later stages are paler."""
        boxes = []
        for rank, actions in enumerate(self.ranks):
            stages = sorted({stage for _, (stage, _, _) in actions})
            boxes += [
                Box(rank, start, kind, number, COLOURS[kind][min(stages.index(stage), 1)])
                for start, (stage, kind, number) in actions
            ]
        return boxes

    @property
    def note(self) -> str:
        paler = ", a rank's later stages paler" if self.stages > len(self.ranks) else ""
        return f"idle {self.idle:.0%}{paler}"

    @property
    def idle(self) -> float:
        """The pipeline bubble: the fraction of the time of all ranks in which they wait."""
        busy = sum(TIME[kind] for played in self.ranks for _, (_, kind, _) in played)
        return 1 - busy / (self.end * len(self.ranks))


@dataclass(frozen=True)
class Box:
    """The drawn box of one action."""

    rank: int
    start: float
    kind: str
    microbatch: int
    colour: str

    @property
    def length(self) -> float:
        return TIME[self.kind]


def pipelines(report: Report) -> list[Timeline]:
    """Simulate the schedule of each cell that has a pipeline. Cells with the same schedule share one timeline."""
    groups: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    for row in report.rows:
        if (row.cell.config.get("parallelism.pp") or 1) > 1:
            recorded = layout.SCHEDULE.read(row.cell.directory)
            if not recorded:
                print(f"{row.label}: no timeline of the pipeline, as the run recorded no schedule", file=sys.stderr)
                continue
            actions = tuple(
                tuple((action["stage"], action["kind"], action["microbatch"]) for action in rank)
                for rank in recorded["ranks"]
            )
            groups[row.cell.config.get("pp_schedule.name"), actions].append(row.label)
    timelines = []
    for (name, actions), labels in groups.items():
        stages = 1 + max(stage for rank in actions for stage, _, _ in rank)
        timelines.append(Timeline(f"{name}: {', '.join(labels)}", stages, play(actions, stages)))
    return timelines


def draw_timeline(pipeline: Timeline, drawn: Figure, axes: Axes) -> Figure:
    """Draw a row for each rank, with a box for each action. The box has the microbatch's number; idle time is empty."""
    count = len(pipeline.ranks)
    width = drawn.get_figwidth() * 72 * 0.88 / pipeline.end  # typographic points on the axis for one unit of time
    axes.barh(range(count), pipeline.end, height=0.8, color=LIGHT["wash"], zorder=0)
    for box in pipeline.boxes:
        axes.barh(
            box.rank,
            box.length,
            left=box.start,
            height=0.8,
            color=LIGHT[box.colour],
            edgecolor=LIGHT["paper"],
            linewidth=0.5,
        )
        if width * box.length > 6 * len(str(box.microbatch)):
            axes.text(
                box.start + box.length / 2,
                box.rank,
                str(box.microbatch),
                ha="center",
                va="center",
                fontsize=7,
                color=LIGHT["ink" if box.colour.startswith("pale") else "paper"],
            )
    for kind in sorted({box.kind for box in pipeline.boxes}, key=list(NAMES).index):
        axes.barh(0, 0, color=LIGHT[COLOURS[kind][0]], label=NAMES[kind])
    axes.text(1, 1.03, pipeline.note, transform=axes.transAxes, ha="right", color=LIGHT["soft"], fontsize=8.5)
    axes.set_yticks(range(count), [f"rank {rank}" for rank in range(count)], color=LIGHT["ink"])
    axes.set_ylim(count - 0.45, -0.55)
    axes.set_xlim(0, pipeline.end)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_title(short(pipeline.title, 70), loc="left")
    return drawn
