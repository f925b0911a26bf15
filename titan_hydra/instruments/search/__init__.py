"""Adaptive search: Optuna draws the values of the keys that a command line sweeps, trial after trial.

Only launch.py with search=optuna, and `titan report` on such a sweep, import more than this file; no rank does.
"""

from titan_hydra.core.job.config.registry import SearchKind, register

from .keys import OptunaSearch

register(SearchKind("optuna", "titan_hydra.instruments.search.driver:run_search", OptunaSearch))
REPORT_SECTIONS = {
    "search": "titan_hydra.instruments.search.lines:section_of_report"
}  # what follows the table of a report
