"""Run directories: claims, states, failures, the search for runs, and sweeps' manifests. Imports no torch."""
