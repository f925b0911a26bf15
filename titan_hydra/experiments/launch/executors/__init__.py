"""Executors, which start ranks: in this process, as processes of this machine, or as jobs of a cluster. The package
registers each of them in the same way in which a user's module (`train.imports`) registers an executor.
"""

import importlib

from titan_hydra.core.job.config.registry import ExecutorKind, register

register(ExecutorKind("inline", f"{__package__}.local:Inline", single=True))
register(ExecutorKind("local", f"{__package__}.local:Processes"))
for _folder in ("slurm", "kubernetes"):
    importlib.import_module(f"{__package__}.{_folder}")
