"""Tickets: immutable handles to offloaded bytes, and what they know of the tiers that hold them.

A ticket is written once, read any number of times, then freed.

[Note: states of a ticket]
::

    put ──> IN_MEMORY                      a host tier had room: the bytes stay, nothing moves
    put ──> WRITING ──> STORED             paths: in memory until the last block is written
            WRITING ──> IN_MEMORY          the write failed: the bytes are kept, the error is raised
    IN_MEMORY ──> WRITING                  evicted from a host tier by what is needed sooner
    adopt ──> STORED                       a range of a foreign file
    STORED ──> LOADING ──> IN_MEMORY       a copy in memory besides the one on the paths
               LOADING ──> STORED          the read failed: the error is raised at `get`
    IN_MEMORY ──> STORED                   the copy was dropped, or handed over to its reader
    any ──> FREED                          blocks under way end first, then extents are reused
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from offload_strategy.io.queues.moves import Move, Stripe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region

#: Where tensors of PyTorch's own begin; what a load would have elsewhere is moved there.
ALIGNMENT_BYTES = 64


@dataclass(eq=False, slots=True)
class DeviceCopy:
    """Bytes on a device, or on their way there: a flat uint8 tensor, or what was put.

    The tensor is None once adopted.
    """

    tensor: torch.Tensor | None
    #: The end of this copy and of those that were launched with it.
    done: torch.Event
    #: The stream of their memory, and the streams that wait for the end.
    allocated_by: int
    awaited_by: set[int]


class TicketState(Enum):
    """Where a ticket's bytes are; see [Note: states of a ticket]."""

    IN_MEMORY = "in memory"
    WRITING = "writing"
    STORED = "stored"
    LOADING = "loading"
    FREED = "freed"


class Tier:
    """A place for tickets, see `store.tiers`; users of the same paths share its `capacity`."""

    #: Whether tickets stay in host memory here, or in the memory of the device that made them.
    is_host_memory = False
    is_own_device = False
    #: The tier's paths and their regions; none for host memory.
    queues: tuple[PathQueue, ...] = ()
    regions: Sequence[Region] = ()
    #: Whether all paths transfer directly from and to device memory.
    device_memory = False

    def __init__(self, name: str, capacity: int) -> None:
        self.name, self.capacity = name, capacity

    @property
    def used_bytes(self) -> int:
        """Bytes in use, by any user of the same paths."""
        raise NotImplementedError

    def has_room(self, nbytes: int) -> bool:
        """Whether its memory has room for `nbytes` more; False for paths."""
        return False

    def release(self, entry: Entry) -> None:
        """Release what an entry occupies here."""
        raise NotImplementedError


@dataclass(eq=False, slots=True)
class Entry:
    """The store's side of a ticket; changed only by the store, under its lock."""

    client: str
    nbytes: int
    device: torch.device
    next_use: float | None = None
    #: See `Move`.
    one_block_at_a_time: bool = False
    #: None for a range of a foreign file, and for a ticket of no bytes.
    tier: Tier | None = None
    #: Where it may go when it has to leave a host tier.
    lower: Sequence[Tier] = ()
    state: TicketState = TicketState.IN_MEMORY
    #: The bytes, where a copy is in memory.
    payload: torch.Tensor | None = None
    #: The device tensor that a copy to the host still reads, and the copy's end.
    source: torch.Tensor | None = None
    copied: torch.Event | None = None
    #: A copy on its way to the device, for the next `TensorStore.get`.
    staged: DeviceCopy | None = None
    stripes: Sequence[Stripe] = ()
    #: Bytes of the stripes that come before the ticket's own: what lies there in its pages.
    begin: int = 0
    move: Move | None = None
    #: When the bytes had been written (`time.perf_counter`).
    written_at: float | None = None
    #: When its last load was queued and when it ended.
    load_times: tuple[float, float] | None = None
    #: The host buffer of a freed ticket, for the one that replaces it.
    buffer: torch.Tensor | None = None
    #: Under which the registry knows the ticket.
    reference: weakref.ref[Ticket] | None = None

    @property
    def is_in_host_memory(self) -> bool:
        """Whether its bytes are in host memory, or will be when a copy is over."""
        return self.payload is not None and self.payload.device.type == "cpu"

    @property
    def may_leave(self) -> bool:
        """Whether it is in a host tier and can be evicted."""
        in_host_tier = self.tier is not None and self.tier.is_host_memory
        return self.state is TicketState.IN_MEMORY and in_host_tier

    @property
    def is_copy(self) -> bool:
        """Whether the bytes in memory may be freed because they are on paths, too."""
        return self.state is TicketState.IN_MEMORY and bool(self.stripes)


@dataclass(eq=False, slots=True)
class CopyOut:
    """Copies to the host of each entry's source; their buffers live until all of them are done."""

    entries: Sequence[Entry]
    hosts: Sequence[torch.Tensor]
    begun: torch.Event
    done: torch.Event


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

    def __repr__(self) -> str:
        entry = self.entry
        return f"Ticket({entry.client}, {entry.nbytes} bytes, {entry.state.value})"
