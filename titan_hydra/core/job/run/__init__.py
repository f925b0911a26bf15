"""The files of a run: their names and shapes, what a rank records, and what failed. Imports no torch."""
