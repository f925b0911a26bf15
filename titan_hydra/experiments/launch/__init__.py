"""The launcher, which starts and watches the ranks of cells, and the worker, which is the entry point of each rank.

Nothing here imports torch before a rank starts.
"""
