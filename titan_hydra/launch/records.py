"""What several commands read: dotted keys of a configuration, the end of a log, and who is still alive."""
from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from titan_hydra.config.shapes import intact


def flat(tree: dict, prefix: str = "") -> dict[str, Any]:
    """Nested dicts as dotted keys; an empty one is a value."""
    leaves = {}
    for name, value in tree.items():
        leaves |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: value}
    return leaves


def last_lines(path: Path, count: int = 30, limit: int = 65536) -> str:
    """The last lines of a log, as text; "" when there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - limit, 0))
            return "\n".join(file.read().decode(errors="replace").rstrip().splitlines()[-count:])
    except OSError:
        return ""


def last_record(path: Path) -> dict:
    """The last intact line of a .jsonl file, of its last two; {} when there is none. The trainer may be writing the last one."""
    for line in reversed(last_lines(path, 2, 8192).splitlines()):
        with contextlib.suppress(ValueError, RecursionError):
            if intact(path.name, row := json.loads(line)):
                return row
    return {}


def this_process() -> dict:
    """What identifies this process for `alive`, from any other process of this host."""
    return process(os.getpid())


def process(pid: int) -> dict:
    """The same for another process of this host."""
    return {"pid": pid, "born": _born(pid), "host": socket.gethostname()}


def alive(record: dict | None) -> bool:
    """Whether a process recorded with `process` still runs, on this host. A process that has since taken its id does not count."""
    if not record or record.get("host") != socket.gethostname():
        return False
    return record.get("born") is not None and _born(record["pid"]) == record["born"]


def _born(pid: int) -> str | None:
    """Boot and clock tick at which a process started, which no other process shares; None once it has ended (or is a zombie)."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if state in "ZX" else f"{boot} {numbers[18]}"
