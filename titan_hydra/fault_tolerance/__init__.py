"""Replica groups that survive each other's failures: they train separately and average every few steps (Local SGD, DiLoCo), or sum
gradients at every step (torchft).
"""
