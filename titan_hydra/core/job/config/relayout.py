"""The keys that `titan resume` may change: they determine the layout over ranks, but not what the run learns."""

from typing import Any

# `precision` is not among these keys: number formats are a technique, but they change what is computed.
SECTIONS = ("parallelism", "pp_schedule", "ac", "compile", "loss")
KEYS = ("gpus", "data.local_batch")


def with_layout_of(content: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return a job's configuration with the layout of another configuration, both as in config.json."""
    data = content["data"] | {"local_batch": first["data"]["local_batch"]}
    return content | {name: first[name] for name in ("gpus", *SECTIONS)} | {"data": data}
