"""Tickets: bytes that left, written once, read any number of times, then freed.

[Note: states of a ticket]
::

    put ──> IN_MEMORY                      a host tier had room: the bytes stay, nothing moves
    put ──> WRITING ──> STORED             an ssd tier: in memory until the last block is written
            WRITING ──> IN_MEMORY          the write failed: the bytes are kept, the error is raised
    STORED ──> LOADING ──> IN_MEMORY       a copy in memory besides the one on the path
               LOADING ──> STORED          the read failed: the error is raised at `get`
    IN_MEMORY ──> STORED                   the copy was dropped, or handed over to its reader
    any ──> FREED                          blocks under way end first, then the extent is reused
"""

from __future__ import annotations

from enum import Enum

import torch

from offload_strategy.heap.tiers import Tier
from offload_strategy.storage import Extent
from offload_strategy.transfer import Move


class TicketState(Enum):
    """Where a ticket's bytes are; see [Note: states of a ticket]."""

    IN_MEMORY = "in memory"
    WRITING = "writing"
    STORED = "stored"
    LOADING = "loading"
    FREED = "freed"


class Entry:
    """The heap's side of a ticket; changed only by the heap, under its lock."""

    __slots__ = (
        "client",
        "device",
        "error",
        "extent",
        "move",
        "nbytes",
        "payload",
        "source",
        "state",
        "tier",
    )

    def __init__(self, client: str, nbytes: int, device: torch.device, tier: Tier) -> None:
        self.client = client
        self.nbytes = nbytes
        self.device = device
        self.tier = tier
        self.state = TicketState.IN_MEMORY
        #: Flat uint8 tensor with the bytes, where a copy is in memory.
        self.payload: torch.Tensor | None = None
        #: The device tensor that a copy to the host is still reading.
        self.source: torch.Tensor | None = None
        self.extent: Extent | None = None
        self.move: Move | None = None
        self.error: BaseException | None = None


class Ticket:
    """The owner's side: the bytes live as long as this object, or until `Heap.free`."""

    __slots__ = ("__weakref__", "entry")

    def __init__(self, entry: Entry) -> None:
        self.entry = entry

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.entry.nbytes

    @property
    def state(self) -> TicketState:
        """Where the bytes are at this moment."""
        return self.entry.state

    def __repr__(self) -> str:
        entry = self.entry
        return f"Ticket({entry.client}, {entry.nbytes} bytes, {entry.state.value})"
