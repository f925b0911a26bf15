"""Mutants: small faults that are planted in a copy of the package, to measure which of them `titan verify` finds.

Imports nothing, as the server of the copy imports this file before any mutant is planted.
"""
