"""What a job is: the typed schema, the rules across groups, the identity hash. Imports no torch."""
from .checks import check
from .compose import compose_job, explain, register_schema
from .fault import Fault
from .load import data_parallel, freeze, from_dict, identity, processes, read, to_dict, world_size
from .schema import Job

__all__ = [
    "Fault", "Job", "check", "compose_job", "data_parallel", "explain", "freeze", "from_dict", "identity", "processes", "read",
    "register_schema", "to_dict", "world_size",
]
