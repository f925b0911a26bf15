"""Reports from run directories: tables in the form of the TorchTitan paper, plots, and a page. Imports no torch."""
