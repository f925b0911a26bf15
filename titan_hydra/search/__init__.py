"""Adaptive search: Optuna draws the values of the keys that a command line sweeps, trial after trial.

Only launch.py with search=optuna, and `titan report` on such a sweep, import this folder; no rank does.
"""
