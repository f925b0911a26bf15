"""The cells of a report: what each run directory holds, with rates and losses in one form whether the run is done or under way."""
from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from titan_hydra.config.files import read_json
from titan_hydra.config.status import Kind
from titan_hydra.launch.find import Selection
from titan_hydra.launch.records import flat
from titan_hydra.launch.rundir import State, states

SHORT = {Kind.OUT_OF_MEMORY: "OOM"}  # other classes of failure are called what they are called elsewhere


@dataclass(frozen=True)
class Cell:
    """One run directory. `config` is flat (dotted key to value); files that do not exist are empty."""

    name: str
    directory: Path
    overrides: list[str]
    state: State
    config: dict[str, Any] = field(default_factory=dict)
    env: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)  # only of a run that is done
    rows: list[dict[str, Any]] = field(default_factory=list)  # metrics.jsonl
    repeat: bool = False  # the baseline once more, at the end of a packed sweep

    @property
    def done(self) -> bool:
        return self.state.kind == "done"

    @property
    def word(self) -> str:
        """The state in a word or two: done, running, queued, OOM, hang, ..."""
        if self.state.failure:
            kind = self.state.failure.kind
            return "failed" if kind is Kind.UNKNOWN else SHORT.get(kind, str(kind))
        return {"new": "not started"}.get(self.state.kind, self.state.kind)

    @cached_property
    def steady(self) -> list[float]:
        """Tokens per second of the rows that are not the first of a process, which pay for its warm-up."""
        every, last = self.config.get("metrics.log_every", 1), self.config.get("steps")
        rows = [row for row in self.rows[1:] if row["step"] % every == 0 or row["step"] == last]
        return [row["tokens_per_second"] for row in rows]

    @property
    def partial(self) -> bool:
        """Whether the numbers are of a run that is not over, or was stopped; a failed one has none."""
        return not self.done and not self.state.failure and bool(self.steady)

    @property
    def rate(self) -> float | None:
        """Tokens per second and device: the median of the steady steps."""
        return self.result.get("tokens_per_second") if self.done else median(self.steady) if self.partial else None

    @property
    def iqr(self) -> float | None:
        """Distance of the rate's quartiles; of means over `metrics.log_every` steps where the run is not done."""
        if self.done:
            return self.result.get("tokens_per_second_iqr")
        if not self.partial or len(self.steady) < 2:
            return None
        quarters = quantiles(self.steady, n=4)
        return quarters[2] - quarters[0]

    @property
    def measured(self) -> int | None:
        """Steps (rows, where the run is not done) behind the rate."""
        return self.result.get("measured_steps") if self.done else len(self.steady) if self.partial else None

    @property
    def memory(self) -> float | None:
        """Peak GiB reserved, the largest over all ranks."""
        if self.done:
            return self.result.get("memory_gib")
        return max(self._known("memory_reserved_gib", self.rows), default=None)

    @property
    def mfu(self) -> float | None:
        if self.done:
            return self.result.get("mfu")
        shares = self._known("mfu", self.rows[1:])
        return median(shares) if shares else None

    def _known(self, name: str, rows: list[dict]) -> list[float]:
        """A column as far as it was measured, of a run that is not over."""
        return [row[name] for row in rows if row.get(name) is not None] if self.partial else []

    @cached_property
    def losses(self) -> dict[int, float]:
        """Loss of each logged step."""
        return {row["step"]: row["loss"] for row in self.rows}

    @property
    def final_loss(self) -> float | None:
        if self.done and self.result.get("final_loss") is not None:
            return self.result["final_loss"]
        return self.rows[-1]["loss"] if self.rows and not self.state.failure else None

    @property
    def step(self) -> int:
        """The last logged step."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def gpus(self) -> int | None:
        return self.result.get("world_size") or self.config.get("gpus")

    @property
    def commit(self) -> str | None:
        """The commit that ran, with + where the files were not those of it."""
        sha = self.result.get("git_sha") or self.env.get("git_sha")
        return sha and sha[:7] + ("+" if self.dirty else "")

    @property
    def dirty(self) -> bool:
        ours = [name for name in self.env.get("git_untracked") or [] if name.startswith(("titan_hydra/", "conf/", "launch.py"))]
        return bool(self.env.get("git_diff") or ours)

    @property
    def code(self) -> str | None:
        """The commit, and which change to it: the same for the same code."""
        diff = self.env.get("git_diff")
        return self.commit and self.commit + (hashlib.sha256(diff.encode()).hexdigest()[:6] if diff else "")

    def version(self, package: str) -> str | None:
        """Of the process that ran, or of the one that submitted it."""
        return (self.result.get("versions") or self.env.get("versions") or {}).get(package)

    @property
    def device(self) -> str | None:
        return self.result.get("device")


def gather(selection: Selection) -> list[Cell]:
    """Read every cell of a selection."""
    manifest = read_json(selection.manifest / "manifest.json") if selection.manifest else None
    entries = manifest["cells"] if manifest else [{}] * len(selection.cells)
    cells = []
    now_of = states([chosen.directory for chosen in selection.cells])
    for chosen, now, entry in zip(selection.cells, now_of, entries, strict=False):
        directory = chosen.directory
        result = read_json(directory / "result.json") if now.kind == "done" else None
        cells.append(Cell(chosen.name, directory, chosen.overrides, now, flat(read_json(directory / "config.json") or {}),
                          read_json(directory / "env.json") or {}, result or {}, read_rows(directory / "metrics.jsonl"),
                          bool(entry.get("repeat"))))
    return cells


def read_rows(path: Path) -> list[dict]:
    """The rows of metrics.jsonl; the trainer may be writing the last one."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def labels(names: list[str], sweep: bool) -> list[str]:
    """Names less what all of them share: `llama3_8b-fsdp-bf16-<hash>` loses model and hash where precision alone differs.

    A sweep's own names lose only whole `key=value` words, as somebody may have chosen the others.
    """
    if len(names) < 2:
        return names
    if sweep:
        words = [name.split() for name in names]
        shared = {word for word in set.intersection(*map(set, words)) if "=" in word}
        short = [" ".join(word for word in own if word not in shared) for own in words]
    else:
        words = [name.split("-")[:-1] for name in names]
        shared = set.intersection(*map(set, words)) if words else set()
        short = ["-".join(word for word in own if word not in shared) for own in words]
        twice = {label for label in short if short.count(label) > 1}
        short = [f"{label or '-'.join(own)} {name.rpartition('-')[2]}" if label in twice else label
                 for label, own, name in zip(short, words, names, strict=True)]
    return [label or name for label, name in zip(short, names, strict=True)]
