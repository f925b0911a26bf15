"""Values that activation checkpointing must not compute again, as a recomputation could give another value. Imports no
torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

_kept: ContextVar[Callable[[Callable[[], Any]], Any]] = ContextVar("kept", default=lambda compute: compute())


def keep(compute: Callable[..., Any], *args: Any) -> Any:
    """Return compute(*args). When activation checkpointing recomputes a forward, return the value that the forward has
    computed.
    """
    return _kept.get()(lambda: compute(*args))


def kept() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    """Return two contexts, one for a forward and one for its recomputation. In the first, `keep` records its values; in
    the second, it returns these values in the same order.
    """
    values: list[Any] = []

    def record(compute: Callable[[], Any]) -> Any:
        values.append(compute())
        return values[-1]

    return _keeping(record), _keeping(lambda _: values.pop(0))


@contextlib.contextmanager
def _keeping(how: Callable[[Callable[[], Any]], Any]) -> Iterator[None]:
    token = _kept.set(how)
    try:
        yield
    finally:
        _kept.reset(token)
