"""What follows from a job: its ranks, batches, stages and schedules, dtypes, adapters, experts, data sources. Imports
no torch.
"""
