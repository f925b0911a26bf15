"""The data sources of a job, and their shares in a mixture."""

from typing import Any

from titan_hydra.core.job.config.source import Data

# number of samples after which a mixture's pattern repeats; weights are rounded to whole samples of the pattern
PERIOD = 10_000


def data_sources(data: Data) -> dict[str, Any]:
    """Return the sources of a job by the key that holds each: the parts of a mixture, or `data` itself."""
    return (
        {f"data.mixture.{name}": data.mixture[name] for name in sorted(data.mixture)}
        if data.name == "mixture"
        else {"data": data}
    )


def shares(weights: list[float]) -> list[int]:
    """Return how many of PERIOD samples each source gives. Weights are rounded down; the remaining samples go to the
    sources that lost most by rounding.
    """
    exact = [PERIOD * weight / sum(weights) for weight in weights]
    left = PERIOD - sum(map(int, exact))
    cut_most = sorted(range(len(exact)), key=lambda part: int(exact[part]) - exact[part])[:left]
    return [int(share) + (part in cut_most) for part, share in enumerate(exact)]
