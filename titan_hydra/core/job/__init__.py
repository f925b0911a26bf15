"""What follows from a job: its ranks, batches, stages and schedules, dtypes, adapters, experts, data sources. Imports
no torch.
"""

# The configuration comes first: it imports instruments and recipes, which import the other modules of this package.
from . import config as config
