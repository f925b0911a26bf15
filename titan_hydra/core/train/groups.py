"""The interface through which the loop uses replica groups. `Groups` is for a run without them; fault_tolerance has the
classes that communicate.
"""

from collections.abc import Callable, Iterable, Iterator

from torch import Tensor

from titan_hydra.core.data.batch import Batch
from titan_hydra.core.data.loader import Loader

from .step import Agreement


class Groups:
    """A run without replica groups: every step counts, and nothing is exchanged. All ranks must call the same methods
    in the same order.
    """

    leads = True  # whether this group writes the run's result

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The groups' state on this rank, which is part of a checkpoint; the tensors are not copied."""
        return {}

    def begin(self, step: int, data_step: int, resumed: bool) -> tuple[int, bool]:
        """Join the other groups with the weights of `step`, and with the data of `data_step`.

        Returns the step to continue from, and whether a stop was requested meanwhile.
        """
        return step, False

    def report_to(self, event: Callable[..., None]) -> None:
        """From now on, record events of the groups with `event`."""

    def steps(self, done: int, last: int) -> Iterator[int]:
        """Yield the steps after `done`, up to the last. A step that did not count is yielded again."""
        yield from range(done + 1, last + 1)

    def batch(self, step: int, loader: Loader) -> Batch:
        """Return the batch of a step."""
        return loader.next()

    def add_up(self, tensors: Iterable[Tensor]) -> None:
        """Sum tensors over the groups, in place."""

    def add_up_gradients(self) -> None:
        """Sum this rank's shards of the gradients over the groups."""

    def commits(self, agreement: Agreement) -> bool:
        """Whether the step counts. If not, its gradients are dropped and it is repeated."""
        return True

    def stops(self, asked: bool) -> bool:
        """Whether the run stops after this step. `asked` is whether any rank of this group was asked to stop."""
        return asked

    def after_step(self, step: int, loss: float | None) -> tuple[int, bool]:
        """Exchange weights with the other groups if an exchange is due after this step.

        Returns the step to continue from, and whether a stop was requested meanwhile.
        """
        return step, False

    def close(self) -> None:
        """Leave the other groups."""
