"""Batches for one data-parallel rank, which a thread prepares in advance, and the state from which a resumed run
continues exactly.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from titan_hydra.core.base.errors import ConfigError
from titan_hydra.core.base.threads import thread
from titan_hydra.core.job.inputs import DATA_FILES

from .batch import Batch
from .shards import BadShards

READ_BY_PACKAGE = ("reading", "long_texts")  # parts of a signature that change with this package, not with a key
Sample = dict[str, np.ndarray]  # arrays by name; a sample of text has `tokens` [seq_len + 1]


class Samples(Protocol):
    """A source of numbered samples. The state of a slot is the position at which its next sample begins."""

    signature: dict[str, Any]  # values that must be the same when a state is saved and loaded
    separators: tuple[int | None, int | None]  # the begin- and end-of-text ids
    tokenizer: str | None  # SHA-256 of the tokenizer's file; None if ids stand for no text

    def sample(self, number: int, slot: int) -> Sample | None:
        """Return sample `number` for a slot. The numbers of a slot increase, and none is requested twice. None: the
        sample cannot be read; only a source that is read once may return that.
        """

    def state(self, slot: int) -> dict[str, Any]: ...

    def load(self, slot: int, state: dict[str, Any]) -> None: ...


class Loader:
    """An endless series of batches, with the samples of the slots that this rank owns."""

    def __init__(
        self,
        samples: Samples,
        slots: range,
        global_batch: int,
        signature: dict[str, Any],
        collate: Callable[[Sequence[Sample]], Batch],
        prefetch: int,
        bad: BadShards,
        once: int | None = None,
        blank: Sample | None = None,
    ):
        """Create the loader. `collate` is the objective's function that makes a batch of samples; it runs in the loader's
        thread. Only `once` samples are read, if it is given; all later ones are `blank`, of which no element counts.
        """
        self.samples, self.slots, self.global_batch, self.collate, self.prefetch = (
            samples,
            slots,
            global_batch,
            collate,
            prefetch,
        )
        self.signature = signature | samples.signature
        self.bad = bad  # shards that this rank could not read
        self.once, self.blank = once, blank
        self.known = set[str]()  # names of bad shards that all ranks know
        self.step = 0  # number of batches that were made
        self.thread: threading.Thread | None = None
        self.returned = self.start = self._snapshot()

    def next(self) -> Batch:
        """Return the next step's batch. Raises the exception that the thread has raised while it made the batch, if
        there is one.
        """
        if not self.prefetch:
            batch, self.returned = self._produce()
            return batch
        if not self.thread:
            self.ready, self.stop = queue.Queue(self.prefetch), threading.Event()
            self.thread = thread(self._fill, "data")  # a daemon: a download that hangs must not keep a rank alive
            self.thread.start()
        item = self.ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        batch, self.returned = item
        return batch

    def state(self) -> dict[str, Any]:
        """Return the state after the last batch that `next` has returned: step, signature, states of slots, bad shards. It
        can be written as JSON.
        """
        return self.returned

    def news(self) -> dict[str, str]:
        """Return the bad shards, with reasons, that were found up to the last batch and that not all ranks know yet."""
        return {shard: reason for shard, reason in self.returned["bad"].items() if shard not in self.known}

    def take_news(self, news: dict[str, str]) -> None:
        """Add the bad shards that any rank has found; all ranks call this. Raises ConfigError if there are too many."""
        before = dict.fromkeys(self.known, "")
        self.known |= set(news)
        replace(self.bad, found=before | news).check()

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state that `merge` has made of the states of any number of ranks. The state contains this
        rank's slots. Raises ConfigError if it belongs to other data or to another global batch.
        """
        for key, value in self.signature.items():
            saved = state["signature"].get(key)
            if saved is None and key == DATA_FILES:
                continue  # saved before files were recorded
            by_package = key.rpartition(".")[2] in READ_BY_PACKAGE
            if saved != value and (by_package or (saved is None and not key.startswith("data."))):
                raise ConfigError(
                    f"these data are read in another way since the state was saved ({key}={value}): start a new run"
                )
            if saved != value:
                raise ConfigError(
                    f"{key}={value}: the saved order of the data has {key}={saved}; set it back, or start a new run"
                )
        slots = {int(slot): value for slot, value in state["slots"].items()}
        if missing := [slot for slot in self.slots if slot not in slots]:
            raise ConfigError(
                f"the saved state of the data lacks slots {missing} of {self.signature['data.global_batch']}"
            )
        self._halt()
        self.step, self.known = state["step"], set(state.get("bad", {}))
        self.bad.restore(state.get("bad", {}))
        for slot in self.slots:
            self.samples.load(slot, slots[slot])
        self.returned = self._snapshot()

    def rewind(self) -> None:
        """Return to the first batch, so that every validation sees the same samples."""
        known = self.known
        self.load(self.start)
        self.known = known

    def close(self) -> None:
        """End the thread, or abandon it after ten seconds if it hangs in a download."""
        self._halt(timeout=10)

    def _snapshot(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "signature": self.signature,
            "slots": {slot: self.samples.state(slot) for slot in self.slots},
            "bad": dict(self.bad.found),
        }

    def _produce(self) -> tuple[Batch, dict[str, Any]]:
        first = self.step * self.global_batch
        samples = [self._sample(first + slot, slot) for slot in self.slots]
        self.step += 1
        return self.collate(samples), self._snapshot()

    def _sample(self, number: int, slot: int) -> Sample:
        found = self.samples.sample(number, slot) if self.once is None or number < self.once else None
        if found is None:
            assert self.blank is not None, "only a source that is read once may leave out a sample"
            return self.blank
        return found

    def _fill(self) -> None:
        try:
            while not self.stop.is_set():
                self.ready.put(self._produce())
        except BaseException as error:  # a panic of a tokenizer in Rust is not an Exception
            self.ready.put(error)

    def _halt(self, timeout: float | None = None) -> None:
        """Stop the thread that reads ahead, and wait for it, at most `timeout` seconds. The batches it has read are
        dropped.
        """
        if not self.thread:
            return
        self.stop.set()
        waited = 0.0
        while self.thread.is_alive() and (timeout is None or waited < timeout):
            while not self.ready.empty():  # the thread may be blocked on a full queue
                self.ready.get()
            self.thread.join(0.01)
            waited += 0.01
        self.thread = None


def merge(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks after the same step."""
    merged: dict[str, Any] = states[0] | {"slots": {}, "bad": {}}
    for state in states:
        merged["slots"] |= state["slots"]
        merged["bad"] |= state.get("bad", {})
    return merged
