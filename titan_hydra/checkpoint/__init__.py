"""Checkpoints. A step on disk is complete or absent; a damaged one is refused.

`checkpointer` decides when to save, and what to do when a save fails; `state` defines the contents; `writer` writes a
step, computes its checksums and renames it; `safe` reads DCP's files without running code from them; `convert` converts
to and from Hugging Face, whose folders `folder` reads. The steps on disk are listed by runs/checkpoints.py.
"""
