"""Which devices of this machine runs are using: a lease is a file in the temporary folder that a run's processes keep
locked.

There is a file for each device and user, `titan_hydra-device-<device>.<uid>`, as nobody may write another user's file
there. A device is taken if one of its files is locked. The kernel removes the lock when the last process that holds the
file has ended, however it ended, so a lease is never stale. The file's content (run, user, process) is only shown.
Cells that run side by side on CPUs hold leases of places, `cpu0`, `cpu1`, ..., by which they are known to each other.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import os
import re
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from titan_hydra.core.base.text import printable
from titan_hydra.core.job.ranks import visible_devices
from titan_hydra.core.job.run.records import process

PREFIX = "titan_hydra-device-"
DRIVER = Path("/proc/driver/nvidia/gpus")  # a folder for each GPU, which has a file `information`
MOST = 4096  # bytes of a file; more is not read
FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


@dataclass
class Lease:
    """Devices that a run holds until `close`, or until all processes that inherited `files` have ended."""

    devices: list[str] = field(default_factory=list)  # as CUDA_VISIBLE_DEVICES names them; empty on CPUs
    files: list[int] = field(default_factory=list)  # descriptors of the locked files

    def close(self) -> None:
        """Release the devices, unless the run's ranks still hold them."""
        while self.files:
            os.close(self.files.pop())


def take_devices(ranks: int, run: str, visible: list[str]) -> Lease | None:
    """Lease as many of the visible devices as a run has ranks; a place if there are none. Return None if too few devices
    are free; then none is held. If the machine has too few, nothing is leased, and the ranks report it.
    """
    lease = Lease()
    if visible and len(visible) < ranks:
        return lease
    wanted: Iterator[str] | list[str] = visible or (f"cpu{number}" for number in count())
    for device in wanted:
        if len(lease.devices) == (ranks if visible else 1):
            break
        if (file := _lock(device, run)) is not None:
            lease.devices.append(device)
            lease.files += [file] if file >= 0 else []
    if visible and len(lease.devices) < ranks:
        lease.close()
        return None
    if not visible:
        lease.devices = []
    return lease


def holders() -> dict[str, dict[str, str]]:
    """Return for each leased device, by its physical name, what its holder wrote: run, user, pid."""
    held = {}
    for file in sorted(_folder().glob(f"{PREFIX}*.*")):
        if (record := _held(file)) is not None:
            held[file.name.removeprefix(PREFIX).rpartition(".")[0]] = record
    return held


def runs_beside(run: str) -> set[str]:
    """Return the names of the other runs on this machine that hold leases now."""
    return {record["run"] for record in holders().values()} - {run}


def who_holds() -> str:
    """Return which runs hold the visible devices, such as "device 3: run a-12ab (user, pid 17)"."""
    held = holders()
    taken: dict[str, list[str]] = {}
    for device in visible_devices():
        if record := held.get(physical(device)):
            taken.setdefault(f"{record['run']} ({record['user']}, pid {record['pid']})", []).append(device)
    return "; ".join(
        f"device{'s' if len(devices) > 1 else ''} {', '.join(devices)}: run {run}" for run, devices in taken.items()
    )


def physical(device: str) -> str:
    """Return a name of a device that does not depend on how CUDA_VISIBLE_DEVICES names it: its UUID, if the driver tells
    it. Indexes count the GPUs in the order of the bus, which is also CUDA's order if all are of one kind.
    """
    known = []
    for folder in sorted(DRIVER.glob("*")):
        with contextlib.suppress(OSError):
            known += re.findall(r"GPU UUID:\s*(\S+)", (folder / "information").read_text())
    if device.isdigit() and int(device) < len(known):
        device = known[int(device)]
    elif device.startswith("GPU-"):
        device = next((uuid for uuid in known if uuid.startswith(device)), device)
    return re.sub(r"[^A-Za-z0-9-]", "_", device)


def _folder() -> Path:
    return Path(tempfile.gettempdir())


def _lock(device: str, run: str) -> int | None:
    """Lock this user's file of a device, and return its descriptor; -1 if the file system cannot keep a lease, which is
    printed; None if the device is taken.
    """
    path = _folder() / f"{PREFIX}{physical(device)}.{os.geteuid()}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | FLAGS, 0o644)
    except OSError as error:
        return _without(device, path, error.strerror)
    about = os.fstat(file)
    if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid() or about.st_nlink != 1:
        os.close(file)
        return _without(device, path, "not a plain file of this user")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Others look after they have locked their own file, too: of two users, at most one finds the other's unlocked.
        if any(_held(other) is not None for other in _folder().glob(f"{PREFIX}{physical(device)}.*") if other != path):
            raise BlockingIOError
    except BlockingIOError:
        os.close(file)
        return None
    except OSError as error:  # a file system without locks
        os.close(file)
        return _without(device, path, error.strerror)
    sign(file, run)
    return file


def sign(file: int, run: str) -> None:
    """Write into a leased file which run of this user has it, and that this process holds it."""
    content = json.dumps({"run": run, "user": _user(), **process(os.getpid())}).encode()
    with contextlib.suppress(OSError):  # a full disk: the lock alone is enough
        os.fchmod(file, 0o644)  # whatever the umask: other users must be able to look
        os.pwrite(file, content.ljust(MOST), 0)  # in one piece, as others read at any moment


def _without(device: str, path: Path, reason: str | None) -> int:
    print(f"warning: {path}: {reason}; other launchers cannot see that device {device} is taken", file=sys.stderr)
    return -1


def _held(path: Path) -> dict[str, str] | None:
    """Return the content of a lease file that is locked; None if it is not locked, or no lease. The content is somebody
    else's, so what cannot be read counts as unknown.
    """
    record: dict[str, str] = dict.fromkeys(("run", "user", "pid"), "unknown")
    try:
        file = os.open(path, os.O_RDONLY | FLAGS)
    except PermissionError:
        return record  # nobody hides a lease that is not in use
    except OSError:
        return None
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or path.name.rpartition(".")[2] != str(about.st_uid):
            return None
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            pass
        except OSError:
            return None
        with contextlib.suppress(ValueError, RecursionError):
            content = json.loads(os.pread(file, MOST, 0))
            if isinstance(content, dict):
                record |= {
                    name: " ".join(printable(str(content[name])).split())[:200] for name in record if name in content
                }
        return record
    finally:
        os.close(file)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, ImportError, OSError):  # a container may not know the name of the user
        return f"uid {os.getuid()}"
