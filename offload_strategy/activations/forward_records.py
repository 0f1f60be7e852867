"""The record of one forward pass: its saved items, and where their bytes are."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch

from offload_strategy.activations.saved_views import ByteRange
from offload_strategy.activations.use_order import StorageReference, Trace, UseOrder
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, TicketState

#: A shorter wait for a load does not count.
WORTH_SECONDS = 0.001


class LoadScheduler(Protocol):
    """The interface between a record and the prefetcher."""

    def begins(self, record: ForwardRecord) -> None:
        """Note that backward reaches a record."""

    def ended(self, record: ForwardRecord) -> None:
        """Note that backward has used every item of a record."""

    def uses(self, record: ForwardRecord, item: SavedItem) -> None:
        """Note that an item is used for the first time."""

    def missed(self) -> None:
        """Note that an item was needed before its load started."""

    def waited(self, seconds: float) -> None:
        """Note that training waited for a load."""

    def loaded(self, ticket: Ticket) -> None:
        """Note that a load has ended."""

    def fetch_ahead(self, record: ForwardRecord, item: SavedItem) -> None:
        """Start the loads that must start before the next item is used."""


class View(Protocol):
    """A saved view of an item's bytes."""

    unpacked: bool


class SavedItem:
    """A range of one storage, shared by every saved view of it.

    The store's ticket exists as long as some saved view does, that is, as long as the graph.

    Args:
        number: Number among the items of its forward pass.
        span: Range of bytes of the storage.
        storage: Storage of the saved tensor.
        version: Version counter of the saved tensor.
    """

    __slots__ = (
        "__weakref__",
        "_cached",
        "_views",
        "number",
        "payload",
        "range",
        "storage",
        "ticket",
        "used",
        "version",
    )

    def __init__(
        self, number: int, span: ByteRange, storage: StorageReference, version: int
    ) -> None:
        self.number = number
        #: None if the item is kept in memory, or is still in a batch.
        self.ticket: Ticket | None = None
        #: The bytes while they are in a batch.
        self.payload: torch.Tensor | None = None
        self.range = span
        self.storage = storage
        self.version = version
        self.used = False
        self._cached: torch.Tensor | None = None
        self._views: list[weakref.ref[View]] = []

    def add_view(self, view: View) -> None:
        """Add another saved view of these bytes."""
        self._views.append(weakref.ref(view))

    @property
    def leaves(self) -> bool:
        """Whether the item is or will be offloaded."""
        return self.ticket is not None or self.payload is not None

    @property
    def has_pending_views(self) -> bool:
        """Whether a view exists that was never unpacked."""
        return any((view := ref()) is not None and not view.unpacked for ref in self._views)

    @property
    def cached(self) -> bool:
        """Whether the bytes are held in memory for views that are still to be unpacked."""
        return self._cached is not None

    @property
    def still_to_load(self) -> bool:
        """Whether a view is still to be unpacked and no load of its bytes has started."""
        ticket = self.ticket
        return (
            ticket is not None
            and ticket.state is TicketState.STORED
            and self._cached is None
            and self.has_pending_views
        )

    def bytes(self, store: TensorStore) -> torch.Tensor:
        """Return the bytes; they stay in memory only while other views are to be unpacked."""
        assert self.ticket is not None
        payload = store.get(self.ticket) if self._cached is None else self._cached
        store.evict(self.ticket)
        self._cached = payload if self.has_pending_views else None
        return payload


class ForwardRecord:
    """The saved items of one micro-batch's forward pass, in order.

    Several records exist at a time if several micro-batches wait for their backward.

    Args:
        serial: Number of the forward pass.
        store: Store of the bytes.
        prefetcher: Decides what to prefetch.
    """

    def __init__(self, serial: int, store: TensorStore, prefetcher: LoadScheduler) -> None:
        self.serial = serial
        self.trace = Trace()
        #: Bytes of kept items that backward has used.
        self.released_bytes = 0
        #: Bytes of offloaded items that are loaded or loading, and that backward has not used.
        self.loaded_bytes = 0
        #: Of these, bytes that are copied to the device ahead of their use.
        self.staged_bytes = 0
        #: Bytes of the largest item.
        self.largest = 0
        self.plan: UseOrder | None = None
        #: Places of offloaded items in the use order, ascending.
        self.upcoming: list[int] = []
        self._store = store
        self._prefetcher = prefetcher
        self._items: list[weakref.ref[SavedItem]] = []
        self._by_storage: dict[int, list[weakref.ref[SavedItem]]] = {}

    @property
    def in_backward(self) -> bool:
        """Whether backward has used an item."""
        return bool(self.trace.uses)

    @property
    def resident_bytes(self) -> int:
        """Bytes of loaded items in the memory of the device that computes."""
        return self.staged_bytes if self.trace.on_device else self.loaded_bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes of kept items that backward has not used yet."""
        return self.trace.saved_bytes - self.trace.left_bytes - self.released_bytes

    def find(self, tensor: torch.Tensor, wanted: ByteRange) -> SavedItem | None:
        """Return the item that already has these bytes at this version, or None."""
        storage = tensor.untyped_storage()
        for reference in self._by_storage.get(int(storage._cdata), ()):
            item = reference()
            if (
                item is not None
                and item.version == tensor._version
                and item.range.covers(wanted)
                and (wanted.start - item.range.start) % tensor.element_size() == 0
                and item.storage() is storage
            ):
                return item
        return None

    def add(self, tensor: torch.Tensor, span: ByteRange, prefix: int) -> SavedItem:
        """Add an item; it stays in memory until it has a ticket.

        Args:
            tensor: The saved tensor.
            span: Range of bytes of its storage.
            prefix: Hash of the forward pass up to this item (`Trace.prefix_with`).
        """
        storage = tensor.untyped_storage()
        number = self.trace.saved(prefix, span.nbytes)
        self.largest = max(self.largest, span.nbytes)
        watched = self.trace.watch(number, storage, span.nbytes)
        item = SavedItem(number, span, watched, tensor._version)
        reference = weakref.ref(item)
        self._items.append(reference)
        self._by_storage.setdefault(int(storage._cdata), []).append(reference)
        return item

    def unused(self, number: int) -> SavedItem | None:
        """Return an item that exists and was not used yet, or None."""
        item = self._items[number]() if number < len(self._items) else None
        return None if item is None or item.used else item

    def tickets(self) -> Iterator[Ticket]:
        """Yield the tickets of offloaded items that exist, in the order of saving."""
        for reference in self._items:
            if (item := reference()) is not None and item.ticket is not None:
                yield item.ticket

    def follow(self, plan: UseOrder) -> None:
        """Prefetch in this order from now on."""
        self.plan = plan
        places = enumerate(plan.sequence)
        self.upcoming = [place for place, number in places if self._left(number)]

    def _left(self, number: int) -> bool:
        item = self.unused(number)
        return item is not None and item.ticket is not None

    def bytes_of(self, item: SavedItem) -> torch.Tensor:
        """Return the bytes of an offloaded item; `used` must be called after it.

        Raises:
            StorageError: If they could not be read.
        """
        self._begin_use(item)
        ticket = item.ticket
        if ticket is None:
            assert item.payload is not None
            return item.payload
        state = ticket.state
        absent = not item.cached and state in (TicketState.STORED, TicketState.LOADING)
        if absent:
            if state is TicketState.STORED:
                self._prefetcher.missed()
                self._store.prefetch(ticket)  # before prefetches
            # The wait for this item leaves time for that.
            self._prefetcher.fetch_ahead(self, item)
        times = self.trace.device_times
        if times is not None:
            times.wait_begins()
        begin = time.perf_counter()
        payload = item.bytes(self._store)
        waited = time.perf_counter() - begin
        if times is not None:
            times.wait_ended()
        if absent:
            self._prefetcher.waited(waited)
        if absent or waited > WORTH_SECONDS:  # its write could not be cancelled
            self.trace.waited += waited
        self._prefetcher.loaded(ticket)
        return payload

    def used(self, item: SavedItem) -> None:
        """Note that backward used an item, and prefetch the next ones."""
        if self._begin_use(item):
            self.released_bytes += item.range.nbytes
        self._prefetcher.fetch_ahead(self, item)
        if self.trace.complete:
            self._prefetcher.ended(self)

    def _begin_use(self, item: SavedItem) -> bool:
        """Record the first use of an item; return whether this is it."""
        if item.used:
            return False
        if not self.in_backward:
            self._prefetcher.begins(self)
        item.used = True
        self.trace.used(item.number)
        self._prefetcher.uses(self, item)
        return True
