"""Instruments: proofs of layouts, adaptive search, scaling laws, rates. Each is a folder that can be deleted: nothing
outside this wing imports one, and each registers its words, options and columns in the same way as a recipe.
"""
