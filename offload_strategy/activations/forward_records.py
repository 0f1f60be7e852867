"""The record of one forward pass: what left, what stayed, and what to fetch ahead of backward."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch

from offload_strategy.activations.saved_views import ByteRange
from offload_strategy.activations.use_order import Plan, Storage, Trace
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, TicketState

#: A shorter wait for a load counts as none.
WORTH_SECONDS = 0.001


class LoadScheduler(Protocol):
    """What a record tells the prefetcher, and asks of it."""

    def begins(self, record: ForwardRecord) -> None:
        """Backward reaches a record."""

    def ended(self, record: ForwardRecord) -> None:
        """Backward has used every item of a record."""

    def uses(self, record: ForwardRecord, slot: Slot) -> None:
        """An item is used for the first time."""

    def missed(self) -> None:
        """An item was requested before its load began."""

    def waited(self, seconds: float) -> None:
        """Training waited for a load."""

    def loaded(self, ticket: Ticket) -> None:
        """A load has ended."""

    def fetch_ahead(self, record: ForwardRecord, slot: Slot) -> None:
        """Start the loads that must begin before the next item is used."""


class View(Protocol):
    """A saved view of a slot's bytes."""

    unpacked: bool


class Slot:
    """One item: a range of one storage, shared by every saved view of it.

    The store's ticket lives as long as some saved view does, that is, as long as the graph.

    Args:
        number: among the items of its forward pass.
        span: which bytes of the storage.
        storage: of what is saved.
        version: of what is saved.
    """

    __slots__ = (
        "__weakref__",
        "_hot",
        "_views",
        "number",
        "payload",
        "range",
        "storage",
        "ticket",
        "used",
        "version",
    )

    def __init__(self, number: int, span: ByteRange, storage: Storage, version: int) -> None:
        self.number = number
        #: None if the bytes stay where they are, or are still to be given.
        self.ticket: Ticket | None = None
        #: The bytes, while they wait to be given.
        self.payload: torch.Tensor | None = None
        self.range = span
        self.storage = storage
        self.version = version
        self.used = False
        self._hot: torch.Tensor | None = None
        self._views: list[weakref.ref[View]] = []

    def add_view(self, view: View) -> None:
        """Another view of these bytes was saved."""
        self._views.append(weakref.ref(view))

    @property
    def leaves(self) -> bool:
        """Whether the bytes are, or will be, elsewhere."""
        return self.ticket is not None or self.payload is not None

    @property
    def awaited(self) -> bool:
        """Whether a view is alive that was never unpacked."""
        return any((view := ref()) is not None and not view.unpacked for ref in self._views)

    @property
    def hot(self) -> bool:
        """Whether the bytes are held for views that are still to be unpacked."""
        return self._hot is not None

    @property
    def still_to_load(self) -> bool:
        """Whether a view is still to be unpacked and no load of its bytes has begun."""
        ticket = self.ticket
        return (
            ticket is not None
            and ticket.state is TicketState.STORED
            and self._hot is None
            and self.awaited
        )

    def bytes(self, store: TensorStore) -> torch.Tensor:
        """The bytes in memory; kept only while other views are still to be unpacked."""
        assert self.ticket is not None
        payload = store.get(self.ticket) if self._hot is None else self._hot
        store.evict(self.ticket)
        self._hot = payload if self.awaited else None
        return payload


class ForwardRecord:
    """What one micro-batch's forward pass saved, in order.

    Several may be alive at once: micro-batches whose backward is still to come.

    Args:
        serial: number of the forward pass.
        store: where the bytes are.
        prefetcher: decides what to fetch ahead.
    """

    def __init__(self, serial: int, store: TensorStore, prefetcher: LoadScheduler) -> None:
        self.serial = serial
        self.trace = Trace()
        #: Bytes of items that stayed and that backward has used.
        self.released_bytes = 0
        #: Bytes of items that left, are in memory again or soon, and that backward has not used.
        self.loaded_bytes = 0
        self.plan: Plan | None = None
        #: The places in the plan of items that left, in order.
        self.upcoming: list[int] = []
        self._store = store
        self._prefetcher = prefetcher
        self._slots: list[weakref.ref[Slot]] = []
        self._by_storage: dict[int, list[weakref.ref[Slot]]] = {}

    @property
    def in_backward(self) -> bool:
        """Whether backward has used something of it."""
        return bool(self.trace.uses)

    @property
    def kept_bytes(self) -> int:
        """Bytes of items that stayed and that backward has not used yet."""
        return self.trace.saved_bytes - self.trace.left_bytes - self.released_bytes

    def find(self, tensor: torch.Tensor, wanted: ByteRange) -> Slot | None:
        """The slot that already stands for these bytes at this version, if there is one."""
        storage = tensor.untyped_storage()
        for reference in self._by_storage.get(int(storage._cdata), ()):
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

    def add(self, tensor: torch.Tensor, span: ByteRange, prefix: int) -> Slot:
        """Note an item; while it has no ticket it stays in memory.

        Args:
            tensor: what is saved.
            span: which bytes of its storage.
            prefix: what the forward pass looks like with it (`Trace.prefix_with`).
        """
        storage = tensor.untyped_storage()
        number = self.trace.saved(prefix, span.nbytes)
        watched = self.trace.watch(number, storage, span.nbytes)
        slot = Slot(number, span, watched, tensor._version)
        reference = weakref.ref(slot)
        self._slots.append(reference)
        self._by_storage.setdefault(int(storage._cdata), []).append(reference)
        return slot

    def unused(self, number: int) -> Slot | None:
        """An item that is alive and was not used yet."""
        slot = self._slots[number]() if number < len(self._slots) else None
        return None if slot is None or slot.used else slot

    def tickets(self) -> Iterator[Ticket]:
        """Of the items that left and are alive, in the order of saving."""
        for reference in self._slots:
            if (slot := reference()) is not None and slot.ticket is not None:
                yield slot.ticket

    def follow(self, plan: Plan) -> None:
        """Go by a plan from now on."""
        self.plan = plan
        places = enumerate(plan.sequence)
        self.upcoming = [place for place, number in places if self._left(number)]

    def _left(self, number: int) -> bool:
        slot = self.unused(number)
        return slot is not None and slot.ticket is not None

    def bytes_of(self, slot: Slot) -> torch.Tensor:
        """The bytes of an item that left; `used` must follow.

        Raises:
            StorageError: they could not be read.
        """
        self._begin_use(slot)
        ticket = slot.ticket
        if ticket is None:
            assert slot.payload is not None
            return slot.payload
        state = ticket.state
        absent = not slot.hot and state in (TicketState.STORED, TicketState.LOADING)
        if absent:
            if state is TicketState.STORED:
                self._prefetcher.missed()
                self._store.prefetch(ticket)  # before those that come next
            # There will be time while this one is waited for.
            self._prefetcher.fetch_ahead(self, slot)
        begin = time.perf_counter()
        payload = slot.bytes(self._store)
        waited = time.perf_counter() - begin
        if absent:
            self._prefetcher.waited(waited)
        if absent or waited > WORTH_SECONDS:  # on its way out, and not to be stopped
            self.trace.waited += waited
        self._prefetcher.loaded(ticket)
        return payload

    def used(self, slot: Slot) -> None:
        """Backward used an item: fetch what comes next."""
        if self._begin_use(slot):
            self.released_bytes += slot.range.nbytes
        self._prefetcher.fetch_ahead(self, slot)
        if self.trace.complete:
            self._prefetcher.ended(self)

    def _begin_use(self, slot: Slot) -> bool:
        """Whether this is its first use."""
        if slot.used:
            return False
        if not self.in_backward:
            self._prefetcher.begins(self)
        slot.used = True
        self.trace.used(slot.number)
        self._prefetcher.uses(self, slot)
        return True
