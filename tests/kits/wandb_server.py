"""A stand-in for the package wandb in online mode, with a server that keeps wandb's rules of ids and steps."""

from collections.abc import Iterable
from typing import Any


class Server:
    """Holds runs by project and id. Put it in the place of the module `wandb`."""

    def __init__(self) -> None:
        self.runs: dict[str, Online] = {}
        self.deleted: set[str] = set()
        self.warnings = 0  # number of rows that were dropped, as wandb does with a warning

    def init(self, *, id: str, project: str, resume: str, **about: Any) -> "Online":
        """Create a run or, as resume="allow" does, continue the run with this id one step after its last."""
        key = f"{project}/{id}"
        if key in self.deleted:
            raise RuntimeError(f"returned error 409: run {key} was previously created and deleted; try a new run name")
        assert resume == "allow"
        return self.runs.setdefault(key, Online(self, about)).opened()

    def delete(self, key: str) -> None:
        """Delete a run, whose id the server then never takes again."""
        del self.runs[key]
        self.deleted.add(key)

    def Settings(self, **_: Any) -> None:
        """Take any settings."""

    def losses(self) -> Iterable[dict[int, float]]:
        """Return the losses of each run by step."""
        return [{step: row["loss"] for step, row in run.rows.items() if "loss" in row} for run in self.runs.values()]


class Online:
    """A run. The values of one step are merged until a later step is logged; an earlier step is dropped."""

    def __init__(self, server: Server, about: dict[str, Any]) -> None:
        self.server, self.about, self.step = server, about, 0
        self.rows: dict[int, dict[str, float]] = {}

    def opened(self) -> "Online":
        self.step = max(self.rows, default=-1) + 1
        return self

    def log(self, row: dict[str, float], step: int) -> None:
        if step < self.step:
            self.server.warnings += 1
            return
        self.step = step
        self.rows.setdefault(step, {}).update(row)

    def finish(self) -> None:
        pass
