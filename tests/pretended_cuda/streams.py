"""Track the order of work on a pretended device: streams, events, and what the host waited for.

Each stream counts its kernels, and knows up to which kernel of each other stream it has waited: a vector clock. A
kernel that reads what another stream wrote, or overwrites what another stream still reads, without having waited for
it, is a race.
"""

import itertools
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.multiprocessing.reductions import StorageWeakRef

PACKAGE = f"{Path(__file__).parents[2]}/titan_hydra/"
RECORDED: set[int] = set()  # storages that Tensor.record_stream keeps until other streams are done
PINNED: dict[int, StorageWeakRef] = {}  # storages on the host that count as page-locked
WAITS: list[tuple[str, str]] = []  # (what, place) for each time that the host waited for the device


class Stream:
    """A queue of kernels. `seen[id]` is the number of kernels of the stream `id` that must run before the next kernel
    of this one.
    """

    numbers = itertools.count()

    def __init__(self, device=None, priority=0, **_):
        self.id, self.seen, self.device = next(self.numbers), {}, torch.device("cuda", 0)
        self.stream_id = self.cuda_stream = self.id
        self.device_index, self.device_type = 0, 1

    def __enter__(self):
        STACK.append(self)
        return self

    def __exit__(self, *_):
        STACK.pop()

    def kernel(self):
        """Queue a kernel and return its number."""
        self.seen[self.id] = self.seen.get(self.id, 0) + 1
        return self.seen[self.id]

    def waits_for(self, seen):
        """Let all later kernels wait for everything in `seen`."""
        for stream, number in seen.items():
            self.seen[stream] = max(number, self.seen.get(stream, 0))

    def wait_stream(self, other):
        self.waits_for(other.seen)

    def wait_event(self, event):
        self.waits_for(event.seen)

    def record_event(self, event=None):
        return (event or Event()).record(self)

    def synchronize(self):
        host_waits("stream.synchronize")

    def query(self):
        return True

    def is_capturing(self):
        return False


class Event:
    """A mark in a stream."""

    def __init__(self, *_, **__):
        self.seen = {}

    def record(self, stream=None):
        self.seen = dict((stream or current()).seen)
        return self

    def wait(self, stream=None):
        (stream or current()).waits_for(self.seen)

    def synchronize(self):
        host_waits("event.synchronize")

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


DEFAULT = Stream()
STACK = [DEFAULT]


def current(device=None):
    """Return the stream in which kernels are queued now."""
    return STACK[-1]


@contextmanager
def use(stream):
    """Queue kernels in a stream while the block runs; None changes nothing."""
    with stream or STACK[-1]:
        yield


def place():
    """Return the innermost place in the package that is running: its file and function."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.removeprefix(PACKAGE)
        if path != frame.f_code.co_filename and not path.startswith("verify/"):
            return f"{path} {frame.f_code.co_qualname}"
        frame = frame.f_back
    return "outside"


def host_waits(what):
    """Record that the host waits for the device here."""
    WAITS.append((what, place()))


class Memory:
    """Record which stream wrote and read each storage last. Accesses that did not wait are appended to `faults`. Memory
    belongs to the stream that allocated it, and once it is freed, the next kernel of this stream may get it. If another
    stream still uses the memory then, this is a race too, unless the tensor was given to `record_stream`.
    """

    def __init__(self, faults):
        self.faults, self.storages, self.lent = faults, {}, {}

    def kernel(self, op, inputs, outputs):
        """Add a kernel to the current stream. `inputs` and `outputs` are its tensors on the device; `outputs` also has
        those that it changes in place.
        """
        stream = current()
        number = stream.kernel()
        self.freed(stream)
        for tensor in inputs:
            self.settled(tensor, stream, str(op), reads=True)
            self.state(tensor, stream)["reads"][stream.id] = number
        for tensor in outputs:
            self.settled(tensor, stream, str(op), reads=False)
            state = self.state(tensor, stream)
            state["write"], state["reads"] = (stream.id, number), {}

    def state(self, tensor, stream):
        """Return the record of a tensor's storage. The weak reference keeps the storage's address from being used
        again.
        """
        storage = tensor.untyped_storage()
        key = storage._cdata
        state = self.storages.get(key)
        if state is None:
            state = self.storages[key] = {
                "ref": StorageWeakRef(storage),
                "owner": stream,
                "write": (stream.id, 0),
                "reads": {},
            }
        if stream is not state["owner"]:
            self.lent[key, stream.id] = (state, stream.seen[stream.id], f"{list(tensor.shape)} at {place()}")
        return state

    def settled(self, tensor, stream, op, reads):
        """Record a race if other streams used this tensor and were not waited for."""
        state = self.state(tensor, stream)
        uses = [state["write"]] if reads else [state["write"], *state["reads"].items()]
        if any(stream.seen.get(other, 0) < number for other, number in uses):
            self.faults.append(
                f"{op} at {place()} does not wait for the stream that uses its tensor of shape {list(tensor.shape)}"
            )

    def freed(self, stream):
        """Record a fault if this stream may now reuse memory that another stream still uses."""
        for (key, user), (state, number, what) in list(self.lent.items()):
            if state["owner"] is stream and state["ref"].expired():
                waited, recorded = stream.seen.get(user, 0) >= number, key in RECORDED
                if waited or not recorded:
                    del self.lent[key, user]
                if not waited and not recorded:
                    self.faults.append(f"memory is freed while a stream that was not waited for uses it: {what}")


class Held:
    """Measure the memory of tensors that copies between host and device read or wrote. `peaks` has the largest number of
    bytes at once, for each side and file whose code copies. Memory on the device that was given to `record_stream`
    counts until its own stream has waited for the other: before, the allocator cannot use it again.
    """

    def __init__(self, memory, peaks):
        self.memory, self.peaks, self.storages = memory, peaks, {}

    def copied(self, *tensors):
        """Measure these tensors from now on."""
        where = place().partition(" ")[0]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            side = "device" if tensor.is_cuda else "host"
            self.storages.setdefault(
                storage._cdata, (StorageWeakRef(storage), storage.nbytes(), f"on the {side} of {where}")
            )

    def measure(self):
        """Update the peaks."""
        lent = {key for key, user in self.memory.lent if key in RECORDED and not self.waited(key, user)}
        self.storages = {key: entry for key, entry in self.storages.items() if key in lent or not entry[0].expired()}
        now = Counter()
        for _, size, what in self.storages.values():
            now[what] += size
        for what, size in now.items():
            self.peaks[what] = max(size, self.peaks.get(what, 0))

    def waited(self, key, user):
        """Whether the stream that owns a storage has waited for its use by another stream."""
        state, number, _ = self.memory.lent[key, user]
        return state["owner"].seen.get(user, 0) >= number


def pin(tensor):
    """Let the memory of a host tensor count as page-locked. The weak reference keeps its address from being used again."""
    storage = tensor.untyped_storage()
    PINNED[storage._cdata] = StorageWeakRef(storage)


def record_stream(tensor, stream):
    """Keep a tensor's memory until everything that `stream` has queued is done."""
    RECORDED.add(tensor.untyped_storage()._cdata)
