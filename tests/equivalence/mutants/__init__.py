"""Mutants are small faults. They are planted in a copy of the package to measure which of them `titan verify` finds.

This file imports nothing, as the copy's server imports it before any mutant is planted.
"""
