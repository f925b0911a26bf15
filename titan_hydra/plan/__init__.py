"""What a job would take and how fast it would be, from its configuration alone. Imports no torch, as login nodes
plan.
"""
