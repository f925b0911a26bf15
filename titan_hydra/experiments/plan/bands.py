"""The error bands of predicted times. A prediction's band is that of its technique, and of its device if enough rows of
this device were measured.

The bands are from `python benchmarks/planner/left_out.py`: each contains 85 % of the published rows of its technique,
or more, predicted with constants that were fitted without the rows' own publishers. A band is a share of the prediction.
Bands were not narrowed when errors fell, as 12 of 16 rows that were read afterwards are outside such bands.
"""

from __future__ import annotations

from titan_hydra.core.job.config.schema import Job


def technique_of(job: Job) -> str:
    """Return the technique of a job's layout by which its predictions are judged."""
    layout = job.parallelism
    if job.model.sparse:
        return f"experts {'across' if layout.ep > (job.hardware.gpus_per_node or layout.ep) else 'inside'} nodes"
    degrees = [name for name in ("tp", "cp", "pp") if getattr(layout, name) > 1]
    return f"dense, {degrees[-1] if degrees else 'data parallel'}"


# relative half-widths by technique, and by device and technique where at least five rows were measured
BANDS = {
    "dense, cp": 0.25,
    "dense, data parallel": 0.25,
    "dense, pp": 0.2,
    "dense, tp": 0.25,
    "experts across nodes": 0.2,
    "experts inside nodes": 0.35,
    "h100, dense, data parallel": 0.25,
    "a100, dense, data parallel": 0.2,
    "h100, dense, pp": 0.2,
    "h100, dense, tp": 0.25,
    "h100, dense, cp": 0.25,
    "h100, experts across nodes": 0.2,
    "h100, experts inside nodes": 0.35,
    "b200, experts inside nodes": 0.45,
}
DEVICES = ("h100", "h200", "b200", "a100")  # measured by several publishers, or by us
# the least half-width for any other preset of this package: it contains the MI300X's rows, which one publisher measured,
# predicted without them
UNMEASURED = 0.65
CALIBRATED = 0.15  # the half-width for rates that were fitted to runs on the same devices (`titan rates calibrate`)


def band_of(job: Job) -> float:
    """Return the relative half-width of the error band of a job's predicted times."""
    technique, device = technique_of(job), job.hardware.name.partition("_")[0]
    band = BANDS.get(f"{device}, {technique}", BANDS[technique])
    if device in DEVICES:
        return band
    return CALIBRATED if job.hardware.measured else max(band, UNMEASURED)
