"""The record of one forward pass: what left, in which order, and what to fetch ahead."""

from __future__ import annotations

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload_strategy.activations.identity import ByteRange, storage_address, weak_reference
from offload_strategy.heap import Heap, Ticket, TicketState


class Slot:
    """One range of one storage that left, shared by every saved view of it.

    The heap's ticket lives as long as some saved view does, that is, as long as the graph.
    """

    __slots__ = (
        "__weakref__",
        "_hot",
        "_waiting",
        "index",
        "range",
        "storage",
        "ticket",
        "version",
    )

    def __init__(
        self,
        index: int,
        ticket: Ticket,
        span: ByteRange,
        storage: StorageWeakRef,
        version: int,
    ) -> None:
        self.index = index
        self.ticket = ticket
        self.range = span
        self.storage = storage
        self.version = version
        self._hot: torch.Tensor | None = None
        #: Saved views that were neither unpacked nor dropped so far.
        self._waiting = 0

    def expect_one_more(self) -> None:
        """Another view of these bytes was saved."""
        self._waiting += 1

    def one_less(self) -> None:
        """A view was unpacked, or its graph died; the last one lets the loaded bytes go."""
        self._waiting -= 1
        if self._waiting <= 0:
            self._hot = None

    @property
    def still_to_load(self) -> bool:
        """Whether some view is still to be unpacked and no load of its bytes has begun."""
        return self._waiting > 0 and self._hot is None and self.ticket.state is TicketState.STORED

    def bytes(self, heap: Heap) -> torch.Tensor:
        """The bytes in memory; kept only while other views are still to be unpacked."""
        if self._hot is not None:
            return self._hot
        payload = heap.get(self.ticket)
        heap.evict(self.ticket)
        if self._waiting > 1:
            self._hot = payload
        return payload


class ForwardRecord:
    """What one forward pass (one micro-batch) saved, in order.

    Several may be alive at once: micro-batches whose backward is still to come.

    Args:
        heap: where the bytes are.
        prefetch_bytes: how far ahead of the backward pass to load.
    """

    def __init__(self, heap: Heap, prefetch_bytes: int) -> None:
        self._heap = heap
        self._prefetch_bytes = prefetch_bytes
        self._order: list[weakref.ref[Slot]] = []
        self._by_storage: dict[int, list[weakref.ref[Slot]]] = {}
        self.packed_bytes = 0
        self.left_bytes = 0

    def find(self, tensor: torch.Tensor, wanted: ByteRange) -> Slot | None:
        """The slot that already holds these bytes at this version, if there is one."""
        for reference in self._by_storage.get(storage_address(tensor), ()):
            slot = reference()
            if (
                slot is not None
                and slot.version == tensor._version
                and slot.range.covers(wanted)
                and not slot.storage.expired()
            ):
                return slot
        return None

    def add(self, tensor: torch.Tensor, span: ByteRange, ticket: Ticket) -> Slot:
        """Note that a range left."""
        slot = Slot(len(self._order), ticket, span, weak_reference(tensor), tensor._version)
        reference = weakref.ref(slot)
        self._order.append(reference)
        self._by_storage.setdefault(storage_address(tensor), []).append(reference)
        self.left_bytes += span.nbytes
        return slot

    def fetch_ahead(self, slot: Slot) -> None:
        """Begin to load what was saved before `slot`, as far as the prefetch distance reaches.

        Backward needs saved tensors in about the reverse order; at least one is fetched ahead.
        """
        ahead = 0
        for index in range(slot.index - 1, -1, -1):
            earlier = self._order[index]()
            if earlier is None:
                continue
            if ahead and ahead + earlier.ticket.nbytes > self._prefetch_bytes:
                return
            ahead += earlier.ticket.nbytes
            if earlier.still_to_load and not self._heap.prefetch(earlier.ticket):
                return
