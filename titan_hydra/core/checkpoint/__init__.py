"""Checkpoints. A step on disk is complete or absent; a damaged one is refused.

`checkpointer` decides when to save, and what to do when a save fails. `state` defines the contents of a step. `writer`
writes a step, computes its checksums and renames it. `safe` reads DCP's files without running code from them. `convert`
converts to and from Hugging Face's format, which `folder` reads. core/job/run/checkpoints.py lists the steps on disk.
"""
