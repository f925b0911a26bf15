"""Threads of a rank, with the rank's GPU. torch gives a new thread device 0 of the host: what it allocates there, if
only a context of 0.5 GiB, all ranks of a host would take from rank 0.
"""

import sys
import threading
from collections.abc import Callable


def device_setter() -> Callable[[], None]:
    """Return a function that gives the thread that calls it this thread's CUDA device, and does nothing in a process
    without CUDA.
    """
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
