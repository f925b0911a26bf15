"""Replica groups that outlive each other: they train apart and meet every few steps (Local SGD, DiLoCo), or at every step (torchft)."""
