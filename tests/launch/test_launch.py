"""One command line: faults, states of a run, sweeps."""

