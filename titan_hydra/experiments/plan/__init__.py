"""Predict the memory and the speed of a job, only from its configuration. Imports no torch, so that it works on login
nodes.
"""
