"""Where gradients wait for `step()`, which may need them for an update once more."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload_strategy.optimizer.gradients.gradient_sources import Stored
from offload_strategy.optimizer.gradients.offloaded_gradient import GradientStandIn
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.tiers import HostTier, Tier
from offload_strategy.units import MiB

#: Smaller ones stay where they are: to move them costs more than their memory is worth.
_SMALLEST_BYTES = 1 * MiB


class WaitingGradients:
    """Gradients that no update during backward needs any more.

    Those of an accelerator leave it for host memory. What finds no room there goes to the tiers.

    Args:
        store: takes them.
        tiers: where they may go when host memory is used up, in order.
        host_bytes: of host memory in which they may wait.
    """

    def __init__(self, store: TensorStore, tiers: Sequence[Tier], host_bytes: int) -> None:
        self._store = store
        self._room = HostTier("waiting gradients", host_bytes)
        self._tiers = list(tiers)
        # Of the host's own gradients, which are not in the store while they stay.
        self._staying_bytes = 0

    def put(self, stand_in: GradientStandIn) -> None:
        """Have one wait, in its own dtype.

        Raises:
            TierFullError: there is no room anywhere; the gradient is still there.
        """
        nbytes = stand_in.nbytes
        on_host = stand_in.device.type == "cpu"
        if on_host and self._room.has_room(self._staying_bytes + nbytes):
            self._staying_bytes += nbytes
        elif nbytes >= _SMALLEST_BYTES:
            tiers = self._tiers if on_host else [self._room, *self._tiers]

            def store(gradient: torch.Tensor) -> Stored:
                return Stored.put(self._store, gradient, tiers)

            stand_in.relocate(store)

    def start_over(self) -> None:
        """Gradients of another backward are to come; those that waited are gone."""
        self._staying_bytes = 0
