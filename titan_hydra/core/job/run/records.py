"""Helpers that several commands share: the dotted keys of a configuration, the numbers of an objective in a row, and the
test whether a process is alive.
"""

import os
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts into one dict with dotted keys. An empty dict counts as a value."""
    leaves = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return leaves


def beside_loss(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a row, or of a validation, that the objective gives beside its loss: OBJECTIVE/COLUMN."""
    return {name: value for name, value in row.items() if "/" in name}


def this_process() -> dict[str, Any]:
    """Return the record of this process."""
    return process(os.getpid())


def process(pid: int) -> dict[str, Any]:
    """Return a record of a process of this host, by which `alive` recognizes the process later."""
    return {"pid": pid, "born": _born(pid), "host": socket.gethostname()}


def alive(record: dict[str, Any] | None) -> bool:
    """Whether the recorded process still runs on this host. A later process with the same id does not count."""
    if not record or record.get("host") != socket.gethostname():
        return False
    return record.get("born") is not None and _born(record["pid"]) == record["born"]


def _born(pid: int) -> str | None:
    """Return the machine's boot id, and the clock tick at which the process `pid` started. Together with `pid`, these
    identify a process. None if the process has ended or is a zombie.
    """
    if not Path("/proc/self").exists():
        return _started(pid)
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if state in "ZX" else f"{boot} {numbers[18]}"


def _started(pid: int) -> str | None:
    """Return the second at which a process started. It comes from `ps`, as macOS has no /proc. None if the process has
    ended or is a zombie.
    """
    command = ["ps", "-o", "stat=,lstart=", "-p", str(pid)]
    state, _, second = (
        subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip().partition(" ")
    )
    return second.strip() if second and not state.startswith("Z") else None
