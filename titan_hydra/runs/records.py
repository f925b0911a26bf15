"""Helpers that several commands share: dotted keys of a configuration, and whether a process is alive."""

import os
import socket
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from titan_hydra.config.load import kind_of, known_keys
from titan_hydra.config.schema import default_of


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts to dotted keys; an empty dict is a value."""
    leaves = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return leaves


def dotted_config(content: dict[str, Any]) -> dict[str, Any]:
    """Return what a config.json holds, by dotted key. Keys that are younger than the run, as one of version 0.1, have
    their defaults.
    """
    found = flat(content)
    if found.get("model.extra") == {}:  # every run of version 0.1 has it
        del found["model.extra"]
    younger = {
        key: default_of(spec)
        for key, spec in known_keys().items()
        if key not in found and (spec.metadata["late"] or not spec.metadata["identity"]) and not is_dataclass(kind_of(key))
    }
    return younger | found if found else {}


def this_process() -> dict[str, Any]:
    """Return a record that identifies this process to `alive` in any other process of this host."""
    return process(os.getpid())


def process(pid: int) -> dict[str, Any]:
    """Return a record that identifies process `pid` of this host to `alive`."""
    return {"pid": pid, "born": _born(pid), "host": socket.gethostname()}


def alive(record: dict[str, Any] | None) -> bool:
    """Whether a process recorded by `process` still runs on this host. Another process that has reused its id does not
    count.
    """
    if not record or record.get("host") != socket.gethostname():
        return False
    return record.get("born") is not None and _born(record["pid"]) == record["born"]


def _born(pid: int) -> str | None:
    """Return the boot id and clock tick at which a process started, unique to it; None once it has ended (or is a
    zombie).
    """
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if state in "ZX" else f"{boot} {numbers[18]}"
