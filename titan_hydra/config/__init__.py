"""What a job is: the typed schema, its loading, the identity hash. Imports no torch, and nothing that stands above
job/.
"""

from .explain import explain
from .fault import Fault
from .load import from_dict, identity, read, to_dict
from .schema import Job

__all__ = ["Fault", "Job", "explain", "from_dict", "identity", "read", "to_dict"]
