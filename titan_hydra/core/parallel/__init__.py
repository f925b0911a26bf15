"""Parallelism techniques: functions on (module, mesh, job), one file each; `apply` defines their order."""

from .apply import apply
from .mesh import Mesh, build_mesh

__all__ = ["Mesh", "apply", "build_mesh"]
