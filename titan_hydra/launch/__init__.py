"""The launcher: cells, run directories, starting and watching ranks; and the worker, the entry point of each rank.

Nothing here imports torch before a rank starts.
"""
