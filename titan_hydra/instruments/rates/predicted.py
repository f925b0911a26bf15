"""`titan report --predicted` shows what `titan plan` predicts for each run of a report. `titan report --row` prints the
runs in the form of the measurements that `titan rates score` predicts.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.job.config.operation import Hardware
from titan_hydra.core.job.config.schema import Job
from titan_hydra.core.job.run import layout
from titan_hydra.core.job.run.code import import_modules
from titan_hydra.core.job.run.frozen import frozen_job
from titan_hydra.experiments.plan.predict import Prediction, predict
from titan_hydra.experiments.plan.shape import NotPredictable
from titan_hydra.experiments.report.table import Report
from titan_hydra.instruments.rates.calibrate import on
from titan_hydra.instruments.rates.own_row import row_of
from titan_hydra.instruments.rates.published import OWN


def with_predictions(report: Report) -> Report:
    """Return the report with a prediction in each row. The rates of the hardware come from the file that `titan rates
    tune` wrote into the sweep's folder or, without this file, from each run's `hardware`. Raises ConfigError if
    nothing can be predicted.
    """
    rates = layout.RATES.read(report.selection.manifest) if report.selection.manifest else {}
    predictions = [prediction(row.cell.directory, rates) for row in report.own]
    if not any(isinstance(predicted, Prediction) for predicted in predictions):
        raise ConfigError(f"--predicted: {predictions[0]}")  # the reason why the first run cannot be predicted
    own_rows = [
        replace(row, prediction=predicted if isinstance(predicted, Prediction) else None)
        for row, predicted in zip(report.own, predictions, strict=True)
    ]
    foreign = report.rows[len(own_rows) :]
    return replace(report, rows=[*own_rows, *foreign])


def prediction(directory: Path, rates: dict[str, Any]) -> Prediction | str:
    """Predict a run from its config.json, or return the reason why this is impossible."""
    try:
        job = job_of_run(directory)
        predicted = predict(on(job, Hardware(**rates)) if rates else job)
    except NotPredictable as error:
        return str(error)
    return predicted.reason if predicted.reason and predicted.capacity_gib is None else predicted


def measured_rows(report: Report) -> str:
    """Return as YAML a row for each run that is done, with the keys of assets/published.yaml: the job, its median speed, and
    its reserved memory. Raises ConfigError if no run is done, or if a run cannot be read.
    """
    cells = [cell for row in report.rows for cell in row.cell.single if cell.done and cell.rate]
    if not cells:
        raise ConfigError("--row: no run is done and has a speed")
    try:
        jobs = [job_of_run(cell.directory) for cell in cells]
    except NotPredictable as error:
        raise ConfigError(f"--row: {error}") from error
    day = datetime.now(UTC).date()
    rows = [
        row_of(job, cell.directory.name)
        | {
            "source": f"{OWN}, {cell.directory.name}",
            "known": day,
            "device": f"{cell.result['world_size']} x {cell.result['device']}",
        }
        | {"tokens_per_second_per_gpu": round(cell.rate, 1)}
        | ({"memory_gib": round(cell.memory, 2)} if cell.memory else {})
        for job, cell in zip(jobs, cells, strict=True)
    ]
    return yaml.safe_dump(rows, sort_keys=False, default_flow_style=None, width=1_000)


def job_of_run(directory: Path) -> Job:
    """Read a run's job. Raises NotPredictable if its file is damaged, or if another version has written it."""
    content = layout.CONFIG.read(directory)
    if not content:
        raise NotPredictable(f"{directory.name} has no config.json that can be read")
    try:
        import_modules(directory)
        return frozen_job(content, layout.CONFIG.of(directory), directory)
    except ConfigError as error:
        raise NotPredictable(str(error).splitlines()[0]) from error
