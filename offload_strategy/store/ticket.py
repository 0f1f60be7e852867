"""Tickets: bytes that left, written once, read any number of times, then freed.

[Note: states of a ticket]
::

    put ──> IN_MEMORY                      a host tier had room: the bytes stay, nothing moves
    put ──> WRITING ──> STORED             paths: in memory until the last block is written
            WRITING ──> IN_MEMORY          the write failed: the bytes are kept, the error is raised
    IN_MEMORY ──> WRITING                  evicted from a host tier by what is needed sooner
    adopt ──> STORED                       a range of a foreign file
    STORED ──> LOADING ──> IN_MEMORY       a copy in memory besides the one on the paths
               LOADING ──> STORED          the read failed: the error is raised at `get`; or it was
                                           made into the caller's own memory
    IN_MEMORY ──> STORED                   the copy was dropped, or handed over to its reader
    any ──> FREED                          blocks under way end first, then extents are reused
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch

from offload_strategy.io.queues.moves import Move, Stripe
from offload_strategy.store.tiers import HostTier, PathTier, Tier

#: Where tensors of PyTorch's own begin; what a load would have elsewhere is moved there.
ALIGNMENT_BYTES = 64


class TicketState(Enum):
    """Where a ticket's bytes are; see [Note: states of a ticket]."""

    IN_MEMORY = "in memory"
    WRITING = "writing"
    STORED = "stored"
    LOADING = "loading"
    FREED = "freed"


class Entry:
    """The store's side of a ticket; changed only by the store, under its lock."""

    __slots__ = (
        "begin",
        "client",
        "copied",
        "device",
        "load_times",
        "lower",
        "move",
        "nbytes",
        "next_use",
        "one_block_at_a_time",
        "payload",
        "reference",
        "source",
        "state",
        "stripes",
        "tier",
        "whole_pages",
        "written_at",
    )

    def __init__(
        self,
        client: str,
        nbytes: int,
        device: torch.device,
        tier: Tier | None,
        next_use: float | None = None,
    ) -> None:
        self.client = client
        self.nbytes = nbytes
        self.device = device
        #: None for a range of a foreign file, and for a ticket of no bytes.
        self.tier = tier
        #: Where it may go when it has to leave a host tier.
        self.lower: Sequence[PathTier] = ()
        self.next_use = next_use
        self.state = TicketState.IN_MEMORY
        #: When the bytes had been written (`time.perf_counter`).
        self.written_at: float | None = None
        #: Flat uint8 tensor with the bytes, where a copy is in memory.
        self.payload: torch.Tensor | None = None
        #: The device tensor that a copy to the host is still reading, and the copy's end.
        self.source: torch.Tensor | None = None
        self.copied: torch.Event | None = None
        self.stripes: Sequence[Stripe] = ()
        #: Bytes of the stripes that come before the ticket's own: what lies there in its pages.
        self.begin = 0
        self.move: Move | None = None
        #: When its last load was queued and when it ended.
        self.load_times: tuple[float, float] | None = None
        #: Whether what lies around the payload in its pages may be written along.
        self.whole_pages = False
        #: See `Move`.
        self.one_block_at_a_time = False
        #: Under which the ledger knows the ticket.
        self.reference = 0

    @property
    def may_leave(self) -> bool:
        """Whether it lies in a host tier and could be written out."""
        return self.state is TicketState.IN_MEMORY and isinstance(self.tier, HostTier)


class Ticket:
    """The owner's side: the bytes live as long as this object, or until `TensorStore.free`."""

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

    @property
    def load_times(self) -> tuple[float, float] | None:
        """When its last load was queued and when it ended (`time.perf_counter`)."""
        return self.entry.load_times

    def __repr__(self) -> str:
        entry = self.entry
        return f"Ticket({entry.client}, {entry.nbytes} bytes, {entry.state.value})"
