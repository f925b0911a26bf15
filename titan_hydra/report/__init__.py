"""Reads run directories: tables as the paper has them, plots, and what differs between two runs. Imports no torch."""
