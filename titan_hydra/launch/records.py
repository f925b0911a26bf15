"""Small files that several processes share: JSON that is either whole or not there, the end of a log, and who is still alive."""
from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

from titan_hydra.config.files import write_text


def write_json(path: Path, content: Any) -> None:
    """Write, flush to disk, rename: a reader sees the old file or the new one, also after a power cut."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> dict | None:
    """The object in a file; None when there is none yet, or the file was left half-written."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return None


def last_lines(path: Path, count: int = 30, limit: int = 65536) -> str:
    """The last lines of a log, as text; "" when there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(os.fstat(file.fileno()).st_size - limit, 0))
            return "\n".join(file.read().decode(errors="replace").rstrip().splitlines()[-count:])
    except OSError:
        return ""


def last_record(path: Path) -> dict:
    """The last whole line of a .jsonl file; {} when there is none."""
    for line in reversed(last_lines(path, 2, 8192).splitlines()):
        try:
            return json.loads(line)
        except json.JSONDecodeError:  # the trainer is writing it right now
            continue
    return {}


def this_process() -> dict:
    """What identifies this process for `alive`, from any other process of this host."""
    return process(os.getpid())


def process(pid: int) -> dict:
    """The same for another process of this host."""
    return {"pid": pid, "born": _born(pid), "host": socket.gethostname()}


def alive(record: dict | None) -> bool:
    """Whether a process recorded with `process` still runs, on this host. A process that has since taken its id does not count."""
    return bool(record) and record["host"] == socket.gethostname() and record["born"] is not None and _born(record["pid"]) == record["born"]


def _born(pid: int) -> str | None:
    """Boot and clock tick at which a process started, which no other process shares; None once it has ended (or is a zombie)."""
    try:
        state, *numbers = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if state in "ZX" else f"{boot} {numbers[18]}"
