"""The record of one forward pass: what left, in which order, and what to fetch ahead."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from offload_strategy.activations.identity import ByteRange, storage_address
from offload_strategy.heap import Heap, Ticket, TicketState


class View(Protocol):
    """A saved view of a slot's bytes."""

    unpacked: bool


class Slot:
    """One range of one storage that left, shared by every saved view of it.

    The heap's ticket lives as long as some saved view does, that is, as long as the graph.
    """

    __slots__ = ("__weakref__", "_hot", "_views", "index", "range", "storage", "ticket", "version")

    def __init__(
        self,
        index: int,
        ticket: Ticket,
        span: ByteRange,
        storage: weakref.ref[torch.UntypedStorage],
        version: int,
    ) -> None:
        self.index = index
        self.ticket = ticket
        self.range = span
        self.storage = storage
        self.version = version
        self._hot: torch.Tensor | None = None
        self._views: list[weakref.ref[View]] = []

    def add_view(self, view: View) -> None:
        """Another view of these bytes was saved."""
        self._views.append(weakref.ref(view))

    def _awaited(self) -> bool:
        """Whether a view is alive that was never unpacked."""
        return any((view := ref()) is not None and not view.unpacked for ref in self._views)

    @property
    def still_to_load(self) -> bool:
        """Whether a view is still to be unpacked and no load of its bytes has begun."""
        return self.ticket.state is TicketState.STORED and self._hot is None and self._awaited()

    def bytes(self, heap: Heap) -> torch.Tensor:
        """The bytes in memory; kept only while other views are still to be unpacked."""
        payload = heap.get(self.ticket) if self._hot is None else self._hot
        heap.evict(self.ticket)
        self._hot = payload if self._awaited() else None
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
        storage = tensor.untyped_storage()
        for reference in self._by_storage.get(storage_address(tensor), ()):
            slot = reference()
            if (
                slot is not None
                and slot.version == tensor._version
                and slot.range.covers(wanted)
                and (wanted.start - slot.range.start) % tensor.element_size() == 0
                and slot.storage() is storage
            ):
                return slot
        return None

    def add(self, tensor: torch.Tensor, span: ByteRange, ticket: Ticket) -> Slot:
        """Note that a range left."""
        slot = Slot(
            len(self._order), ticket, span, weakref.ref(tensor.untyped_storage()), tensor._version
        )
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
