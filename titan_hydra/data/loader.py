"""Batches for one data-parallel rank, prepared ahead in a thread, and the state from which they continue exactly."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from titan_hydra.base.errors import ConfigError
from titan_hydra.base.threads import thread

from .batch import Batch
from .shards import BadShards

Sample = dict[str, np.ndarray]  # what a source gives of it, by name: of text, the seq_len + 1 `tokens`


class Samples(Protocol):
    signature: dict[str, Any]  # values that must not change between saving and loading a state
    separators: tuple[int | None, int | None]  # the begin- and end-of-text ids
    tokenizer: str | None  # sha256 of the tokenizer's file, which defines the ids; None if they mean nothing

    def sample(self, number: int, slot: int) -> Sample:
        """Return sample `number` for a slot. The numbers of a slot increase, and none is requested twice."""

    def state(self, slot: int) -> dict[str, Any]: ...

    def load(self, slot: int, state: dict[str, Any]) -> None: ...


class Loader:
    """Endless batches of the slots that this rank owns: next(), state(), load(), rewind(), close()."""

    def __init__(
        self,
        samples: Samples,
        slots: range,
        global_batch: int,
        signature: dict[str, Any],
        collate: Callable[[Sequence[Sample]], Batch],
        prefetch: int,
        bad: BadShards,
    ):
        """Create the loader. `collate` is the objective's: it makes a batch of samples, in the loader's thread."""
        self.samples, self.slots, self.global_batch, self.collate, self.prefetch = samples, slots, global_batch, collate, prefetch
        self.signature = signature | samples.signature
        self.bad, self.told = bad, set[str]()  # shards that could not be read; shards that all ranks know of
        self.step = 0  # batches produced
        self.thread: threading.Thread | None = None
        self.returned = self.start = self._snapshot()

    def next(self) -> Batch:
        """Return the next step's batch. Raises here what went wrong while it was prepared."""
        if not self.prefetch:
            batch, self.returned = self._produce()
            return batch
        if not self.thread:
            self.ready, self.stop = queue.Queue(self.prefetch), threading.Event()
            self.thread = thread(self._fill, "data")  # a hung download must not keep a rank alive
            self.thread.start()
        item = self.ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        batch, self.returned = item
        return batch

    def state(self) -> dict[str, Any]:
        """Return the state after the last batch that next() returned: step, signature, slot -> state, and the bad
        shards so far. It can be written as JSON.
        """
        return self.returned

    def news(self) -> dict[str, str]:
        """Return the bad shards, with reasons, that were left out up to the last batch and that not all ranks know
        of.
        """
        return {shard: reason for shard, reason in self.returned["bad"].items() if shard not in self.told}

    def hear(self, news: dict[str, str]) -> None:
        """Count bad shards that other ranks have found. Raises ConfigError if there are too many, on all ranks
        alike.
        """
        self.told |= set(news)
        BadShards(self.bad.limit, dict.fromkeys(sorted(self.told), "") | news).check()

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a state that holds this rank's slots, whatever ranks wrote it (see merge); keys may be JSON's
        strings.

        Raises ConfigError if the state belongs to other data or another global batch.
        """
        for key, value in self.signature.items():
            if state["signature"].get(key) != value:
                raise ConfigError(
                    f"{key}={value}: the saved order of the data has {key}={state['signature'].get(key)}; set it back, or start afresh"
                )
        saved = {int(slot): value for slot, value in state["slots"].items()}
        if missing := [slot for slot in self.slots if slot not in saved]:
            raise ConfigError(f"the saved state of the data lacks slots {missing} of {self.signature['data.global_batch']}")
        self._halt()
        self.step, self.told = state["step"], set(state.get("bad", {}))
        self.bad.found = state.get("bad", {}) | self.bad.found
        for slot in self.slots:
            self.samples.load(slot, saved[slot])
        self.returned = self._snapshot()

    def rewind(self) -> None:
        """Return to the first batch, so that every validation sees the same samples."""
        told = self.told
        self.load(self.start)
        self.told = told

    def close(self) -> None:
        """End the thread; one that hangs in a download is abandoned after ten seconds."""
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
        samples = [self.samples.sample(first + slot, slot) for slot in self.slots]
        self.step += 1
        return self.collate(samples), self._snapshot()

    def _fill(self) -> None:
        try:
            while not self.stop.is_set():
                self.ready.put(self._produce())
        except BaseException as error:  # a Rust panic in a tokenizer is no Exception
            self.ready.put(error)

    def _halt(self, timeout: float | None = None) -> None:
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
    """Merge all ranks' states of the same step into one."""
    return states[0] | {key: {name: value for part in states for name, value in part.get(key, {}).items()} for key in ("slots", "bad")}
