"""Reads run directories: tables in the paper's form, plots, and the differences between two runs. Imports no torch."""
