"""`titan report --predicted`: what `titan plan` predicts for each run of a report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from titan_hydra.base.errors import ConfigError
from titan_hydra.config.load import from_dict
from titan_hydra.config.operation import Hardware
from titan_hydra.config.schema import Job
from titan_hydra.plan.calibrate import on
from titan_hydra.plan.predict import Prediction, predict
from titan_hydra.plan.shape import NotPredictable
from titan_hydra.runs import layout

from .table import Report


def with_predictions(report: Report) -> Report:
    """Return the report with a prediction in each row, from the rates that `titan plan --tune` wrote into the sweep's
    folder, else from each run's `hardware`. Raises ConfigError if nothing can be predicted.
    """
    rates = layout.RATES.read(report.selection.manifest) if report.selection.manifest else {}
    found = [prediction(row.cell.directory, rates) for row in report.rows]
    if not any(isinstance(one, Prediction) for one in found):
        raise ConfigError(f"--predicted: {found[0]}")
    rows = [replace(row, prediction=one if isinstance(one, Prediction) else None) for row, one in zip(report.rows, found, strict=True)]
    return replace(report, rows=rows)


def prediction(directory: Path, rates: dict[str, Any]) -> Prediction | str:
    """Predict a run from its config.json; if that is impossible, return the reason."""
    content = layout.CONFIG.read(directory)
    if not content:
        return f"{directory.name} has no config.json that can be read"
    try:
        job = from_dict(Job, content)
        found = predict(on(job, Hardware(**rates)) if rates else job)
    except (KeyError, TypeError):
        return f"{directory.name} was written by another version of titan_hydra"
    except NotPredictable as error:
        return str(error)
    return found.reason if found.reason and found.capacity_gib is None else found
