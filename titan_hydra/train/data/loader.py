"""Batches for one data-parallel rank, prepared ahead of the step in a thread, and the state from which they go on exactly."""
from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from titan_hydra.config.status import ConfigError
from titan_hydra.train.loss import IGNORED


@dataclass
class Batch:
    """This rank's samples of one step, all [slots, seq_len] int64; documents and positions only under data.document_mask."""

    tokens: torch.Tensor
    labels: torch.Tensor
    documents: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def split(self, size: int) -> list[Batch]:
        """Microbatches of `size` samples, in order."""
        return [self._each(lambda tensor, row=row: tensor[row : row + size]) for row in range(0, len(self.tokens), size)]

    def to(self, device: torch.device) -> Batch:
        """The batch on a device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        return Batch(*(None if tensor is None else change(tensor) for tensor in (self.tokens, self.labels, self.documents, self.positions)))


class Samples(Protocol):
    signature: dict[str, Any]  # what must not change for a saved state to fit

    def sample(self, step: int, slot: int) -> np.ndarray:
        """The seq_len + 1 tokens that a slot takes in a step; called with every step once, in order."""

    def state(self, slot: int) -> dict[str, int]: ...

    def load(self, slot: int, state: dict[str, int]) -> None: ...


class Loader:
    """Endless batches of the slots that this rank owns: next(), state(), load(), rewind(), close()."""

    def __init__(self, samples: Samples, slots: range, signature: dict[str, Any], separators: tuple[int | None, int | None] | None,
                 prefetch: int):
        """`separators` are the begin- and end-of-text ids that a document mask goes by; None: no mask."""
        self.samples, self.slots, self.separators, self.prefetch = samples, slots, separators, prefetch
        self.signature = signature | samples.signature
        self.step = 0  # batches produced
        self.thread: threading.Thread | None = None
        self.returned = self.start = self._snapshot()

    def next(self) -> Batch:
        """The next step's batch. What goes wrong while it is prepared is raised here."""
        if not self.prefetch:
            batch, self.returned = self._produce()
            return batch
        if not self.thread:
            self.ready, self.stop = queue.Queue(self.prefetch), threading.Event()
            self.thread = threading.Thread(target=self._fill, name="data", daemon=True)  # a hung download must not keep a rank alive
            self.thread.start()
        item = self.ready.get()
        if isinstance(item, BaseException):
            self.close()
            raise item
        batch, self.returned = item
        return batch

    def state(self) -> dict[str, Any]:
        """Where the last batch that next() returned ended: step, signature, and slot -> state. JSON can hold it."""
        return self.returned

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state that holds this rank's slots, whatever ranks wrote it (see merge); keys may be JSON's strings.

        Raises ConfigError where the state belongs to other data or another global batch.
        """
        for key, value in self.signature.items():
            if state["signature"].get(key) != value:
                raise ConfigError(f"{key}={value}: the saved order of the data has {key}={state['signature'].get(key)}; "
                                  "set it back, or start afresh")
        saved = {int(slot): value for slot, value in state["slots"].items()}
        if missing := [slot for slot in self.slots if slot not in saved]:
            raise ConfigError(f"the saved state of the data lacks slots {missing} of {self.signature['data.global_batch']}")
        self._halt()
        self.step = state["step"]
        for slot in self.slots:
            self.samples.load(slot, saved[slot])
        self.returned = self._snapshot()

    def rewind(self) -> None:
        """Back to the first batch, so that every validation sees the same samples."""
        self.load(self.start)

    def close(self) -> None:
        """End the thread; one that hangs in a download is left behind after ten seconds."""
        self._halt(timeout=10)

    def _snapshot(self) -> dict[str, Any]:
        return {"step": self.step, "signature": self.signature, "slots": {slot: self.samples.state(slot) for slot in self.slots}}

    def _produce(self) -> tuple[Batch, dict[str, Any]]:
        tokens = np.stack([self.samples.sample(self.step, slot) for slot in self.slots]).astype(np.int64)
        self.step += 1
        return cut(tokens, self.separators), self._snapshot()

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
            while not self.ready.empty():  # the thread may wait for room
                self.ready.get()
            self.thread.join(0.01)
            waited += 0.01
        self.thread = None


def merge(states: list[dict[str, Any]]) -> dict[str, Any]:
    """One state out of all ranks' states of the same step."""
    return states[0] | {"slots": {slot: state for part in states for slot, state in part["slots"].items()}}


def cut(tokens: np.ndarray, separators: tuple[int | None, int | None] | None) -> Batch:
    """Inputs and labels of samples [n, S + 1]; with separators also which document each token is of, and its place in it.

    The token that begins a document is a label of nothing: no text before it says that it comes.
    """
    inputs, labels = tokens[:, :-1], tokens[:, 1:].copy()
    if separators is None:
        return Batch(torch.from_numpy(inputs.copy()), torch.from_numpy(labels))
    begins = _begins(tokens, *separators)
    labels[begins[:, 1:]] = IGNORED
    place = np.arange(inputs.shape[1])
    positions = place - np.maximum.accumulate(np.where(begins[:, :-1], place, 0), axis=1)
    documents = begins[:, :-1].cumsum(axis=1)
    documents -= documents[:, :1]  # a sample's first document is number 0, whether or not it begins there
    return Batch(*map(torch.from_numpy, (inputs.copy(), labels, documents, positions)))


def _begins(tokens: np.ndarray, bos: int | None, eos: int | None) -> np.ndarray:
    """True where a document begins: at begin-of-text, or behind end-of-text where the tokenizer has no begin-of-text."""
    if bos is not None:
        return tokens == bos
    begins = np.zeros(tokens.shape, dtype=bool)
    if eos is not None:
        begins[:, 1:] = tokens[:, :-1] == eos
    return begins
