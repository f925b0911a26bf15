"""The login node's half: cells, run directories, starting ranks and watching them; and the worker that each rank starts with.

Nothing here imports torch before a rank starts.
"""
