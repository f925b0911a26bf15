"""What the ranks agree on in each step."""

import torch


class Agreement:
    """Values of a step that are the same on all ranks once the step's gradients are computed. The device can use them
    at once, the host after `read`.
    """

    empty = False  # after `read`: whether no element of the global batch counts, so that there is no loss

    def __init__(self, norm: torch.Tensor, sums: torch.Tensor, empty: torch.Tensor | None = None) -> None:
        """Store values. `sums` are sums over all ranks (float64): the loss, the number of ranks that were asked to
        stop, the votes. `empty` is whether no element counts, which all ranks know.
        """
        self.norm, self.finite = norm, sums[0].isfinite() & norm.isfinite()
        no_loss = torch.zeros_like(norm) if empty is None else empty
        # the copy begins now, so that it does not wait for work queued later
        self.host = torch.cat([torch.stack([norm.double(), no_loss.double()]), sums]).to("cpu", non_blocking=True)
        self.copied = torch.cuda.current_stream().record_event() if norm.is_cuda else None

    def read(self) -> tuple[float, float, bool, list[float]]:
        """Return loss, norm, whether any rank was asked to stop, and the sums of the votes. This is the step's only
        wait for the device.
        """
        if self.copied is not None:
            self.copied.synchronize()
        norm, empty, loss, stop, *votes = self.host.tolist()
        self.empty = empty > 0
        return loss, norm, stop > 0, votes
