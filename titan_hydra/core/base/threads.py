"""Threads whose CUDA device is that of their rank, and the number of cores. In a new thread, torch's current device is
device 0 of the host. There the thread would create a context, which takes at least 0.5 GiB of rank 0's memory.
"""

import os
import sys
import threading
from collections.abc import Callable


def cores() -> int:
    """Return the number of cores that this process may use."""
    # macOS has no function that returns the cores on which a process may run
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_setter() -> Callable[[], None]:
    """Return a function that gives this thread's CUDA device to the thread that calls it; without CUDA it does nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return lambda: None
    device = torch.cuda.current_device()
    return lambda: torch.cuda.set_device(device)


def thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Return a daemon thread, not started yet, that has this thread's CUDA device."""
    set_device = device_setter()

    def run() -> None:
        set_device()
        target()

    return threading.Thread(target=run, name=name, daemon=True)
