"""titan_hydra: pre-training experiments with large language models, composed with Hydra and run with PyTorch.

For a notebook or a script: `launch`, `plan`, `runs` and `report` (docs/notebook.md), imported when they are used.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titan_hydra.notebook import launch, plan, report, runs

__version__ = "0.1.0"
__all__ = ["__version__", "launch", "plan", "report", "runs"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from titan_hydra import notebook

    return getattr(notebook, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
