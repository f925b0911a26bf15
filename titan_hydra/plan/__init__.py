"""Predict the memory and the speed of a job from its configuration alone. Imports no torch, so that it works on login
nodes.
"""
