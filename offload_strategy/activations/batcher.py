"""What leaves is given to the store a few items at a time.

[Note: a few at a time]
After every operation of a model that computes on the host the processor's caches hold tensors, and
Python code begins cold: to give one tensor to the store takes several times as long as to give the
next one right after it, and each wakes a thread that takes a core away. So items wait for each
other, while they are no more than a small share of what a pass saves.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from offload_strategy.units import MiB

if TYPE_CHECKING:
    from offload_strategy.activations.forward_records import Slot

#: Bytes that wait for others at most, and as a share of what a forward pass saves.
_MOST_BYTES = 48 * MiB
_SHARE = 0.07
#: What a path does not take in so many seconds would come in bursts: then fewer wait.
_SECONDS = 0.03
_SLOW_BYTES = 16 * MiB
_SLOW_SHARE = 0.03


def batch_bytes(saved_bytes: int, rate: float | None = None) -> int:
    """How many bytes are worth being moved together.

    Args:
        saved_bytes: of a whole forward pass, as far as known.
        rate: bytes per second that the tiers take, or None while that is not known.
    """
    most = min(_MOST_BYTES, int(_SHARE * saved_bytes))
    if rate is None:
        return most
    return max(min(_SLOW_BYTES, int(_SLOW_SHARE * saved_bytes)), min(most, int(rate * _SECONDS)))


class _Waiting(threading.local):
    """Of one thread's forward pass."""

    def __init__(self) -> None:
        self.items: list[tuple[weakref.ref[Slot], int]] = []
        self.nbytes = 0


class Outbox:
    """Items on their way to the store; each thread has its own.

    Items hold their bytes themselves: what dies on the way was never given.

    Args:
        give: gives an item's payload to the store: of the item, and of the time of its next use.
    """

    def __init__(self, give: Callable[[Slot, int], None]) -> None:
        self._give = give
        self._waiting = _Waiting()

    def add(self, slot: Slot, next_use: int, at_least: int) -> None:
        """Give an item now or soon.

        Args:
            slot: with its `payload`.
            next_use: on the store's clock.
            at_least: bytes to give together; 0 for at once.
        """
        waiting = self._waiting
        waiting.items.append((weakref.ref(slot), next_use))
        waiting.nbytes += slot.range.nbytes
        if waiting.nbytes >= at_least:
            self.empty()

    def empty(self) -> None:
        """Give what waits on this thread."""
        waiting = self._waiting
        items, waiting.items, waiting.nbytes = waiting.items, [], 0
        for reference, next_use in items:
            slot = reference()
            if slot is not None and slot.payload is not None:
                self._give(slot, next_use)

    @property
    def nbytes(self) -> int:
        """What waits on this thread."""
        return self._waiting.nbytes

    def forget(self) -> None:
        """Leave what waits on this thread where it is: its pass has failed."""
        self._waiting.items, self._waiting.nbytes = [], 0
