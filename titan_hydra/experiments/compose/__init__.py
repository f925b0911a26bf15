"""Cells of a command line: Hydra's composition, overrides, sweeps, and what is printed about their faults."""
