"""What a job is: the typed schema, the rules across groups, the identity hash. Imports no torch."""
from .compose import compose_job, register_schema
from .explain import explain
from .fault import Fault
from .load import all_ranks, data_parallel, freeze, from_dict, identity, processes, read, to_dict, world_size
from .rules.checks import check
from .schema import Job

__all__ = [
    "Fault", "Job", "all_ranks", "check", "compose_job", "data_parallel", "explain", "freeze", "from_dict", "identity",
    "processes", "read", "register_schema", "to_dict", "world_size",
]
