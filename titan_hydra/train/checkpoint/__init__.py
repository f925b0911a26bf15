"""Checkpoints: complete or absent, intact or refused.

`folder` knows the steps on disk and needs no torch; `safe` reads DCP's files without running what is in them; `writer` writes a step,
sums it and gives it its name; `state` is what a checkpoint holds; `checkpointer` decides when, and what to do when it fails.
"""
