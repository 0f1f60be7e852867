"""Batches of saved tensors that are given to the store together.

[Note: batches]
After each operation of a model on the CPU, the processor's caches hold tensors and Python code runs
cold: to give one tensor to the store takes several times as long as to give the next one right
after it, and each wakes a thread that takes a core from computation. So items wait for each other
as long as they are a small share of what a pass saves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from offload_strategy.units import MiB

if TYPE_CHECKING:
    from offload_strategy.activations.forward_records import SavedItem

#: Largest batch in bytes, and as a share of what a forward pass saves.
_MOST_BYTES = 48 * MiB
_SHARE = 0.07
#: A batch that a path cannot write in so many seconds would cause bursts: then it is smaller.
_SECONDS = 0.03
_SLOW_BYTES = 16 * MiB
_SLOW_SHARE = 0.03


def batch_bytes(saved_bytes: int, rate: float | None = None) -> int:
    """Return the size of a batch in bytes.

    Args:
        saved_bytes: Bytes that a forward pass saves, as far as known.
        rate: Write rate of the tiers in bytes per second, or None if unknown.
    """
    most = min(_MOST_BYTES, int(_SHARE * saved_bytes))
    if rate is None:
        return most
    return max(min(_SLOW_BYTES, int(_SLOW_SHARE * saved_bytes)), min(most, int(rate * _SECONDS)))


class _Waiting(threading.local):
    """The batch of one thread's forward pass."""

    def __init__(self) -> None:
        self.items: list[tuple[weakref.ref[SavedItem], int]] = []
        self.nbytes = 0


class OffloadBatcher:
    """Collects items for the store; each thread has its own batch.

    Items hold their bytes themselves: an item that is freed in a batch is never offloaded.

    Args:
        give: Gives the payload of an item to the store, with the time of its next use.
    """

    def __init__(self, give: Callable[[SavedItem, int], None]) -> None:
        self._give = give
        self._waiting = _Waiting()

    def add(self, item: SavedItem, next_use: int, at_least: int) -> None:
        """Add an item to the batch, and give the batch to the store if it is large enough.

        Args:
            item: The item, with its `payload`.
            next_use: Time of its next use on the store's clock.
            at_least: Bytes of a full batch; 0 to give the item at once.
        """
        waiting = self._waiting
        waiting.items.append((weakref.ref(item), next_use))
        waiting.nbytes += item.range.nbytes
        if waiting.nbytes >= at_least:
            self.flush()

    def flush(self) -> None:
        """Give this thread's batch to the store."""
        waiting = self._waiting
        items, waiting.items, waiting.nbytes = waiting.items, [], 0
        for reference, next_use in items:
            item = reference()
            if item is not None and item.payload is not None:
                self._give(item, next_use)

    @property
    def nbytes(self) -> int:
        """Bytes of this thread's batch."""
        return self._waiting.nbytes

    def discard(self) -> None:
        """Keep this thread's batch in memory, because its pass has failed."""
        self._waiting.items, self._waiting.nbytes = [], 0
