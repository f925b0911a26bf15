"""Checkpoints: complete or absent, intact or refused.

`folder` lists the steps on disk and needs no torch; `safe` reads DCP's files without running code from them; `writer`
writes a step, computes its checksums and renames it; `state` defines the contents; `checkpointer` decides when to save,
and what to do when a save fails.
"""
