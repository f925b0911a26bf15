"""Parallelism helpers: functions on (module, mesh, config), a file per technique; `apply` holds their order."""
from .apply import apply
from .mesh import Mesh, build_mesh

__all__ = ["Mesh", "apply", "build_mesh"]
