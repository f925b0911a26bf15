"""The run directory: claims, states, failures, finding runs, manifests. Imports no torch."""
