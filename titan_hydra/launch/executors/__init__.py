"""Where ranks run: in this process, on this machine, or as jobs of a SLURM cluster. Each registers itself, as an
executor in a module of `train.imports` does.
"""

import importlib

from titan_hydra.config.registry import ExecutorKind, register

register(ExecutorKind("inline", f"{__package__}.local:Inline", single=True))
register(ExecutorKind("local", f"{__package__}.local:Processes"))
importlib.import_module(f"{__package__}.slurm")
