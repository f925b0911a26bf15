"""The keys that `titan resume` may change: how a run is laid out over ranks, which changes nothing of what it learns."""

from typing import Any

# Number formats are not among them, although they are techniques too: they change what is computed.
SECTIONS = ("parallelism", "pp_schedule", "ac", "compile", "loss")
KEYS = ("gpus", "data.local_batch")


def with_layout_of(content: dict[str, Any], first: dict[str, Any]) -> dict[str, Any]:
    """Return a job's configuration with the layout of another configuration, both as in config.json."""
    data = content["data"] | {"local_batch": first["data"]["local_batch"]}
    return content | {name: first[name] for name in ("gpus", *SECTIONS)} | {"data": data}
