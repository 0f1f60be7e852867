"""The record of one forward pass: its saved items, where their bytes are, and their times.

[Note: items, traces and use orders]
An *item* is one range of one storage that autograd saved and that could be offloaded, whether it
was or not; items are numbered in the order of saving. The *trace* of a forward pass records when
each item was saved, and when backward first used it. Forward passes that save the same kinds of
items in the same order (whatever their sizes: sequences vary in length) share a *use order*: the
order of first uses and their times, without the time that backward waited for bytes. A pass of a
new kind is assumed to use items in the reverse order of saving, at unknown times.
"""

from __future__ import annotations

import sys
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from threading import get_ident
from timeit import default_timer as perf_counter
from typing import Any

import torch

from offload_strategy.activations.device_times import DeviceTimes
from offload_strategy.activations.eligibility import covers, reach_of_base
from offload_strategy.store.ticket import Entry, Ticket, TicketState
from offload_strategy.torch_support.accelerator import current_stream, is_asynchronous


class StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference to an item's storage, which others may keep alive, and its entry, if any."""

    __slots__ = ("entry", "nbytes", "number")

    number: int
    nbytes: int
    entry: Entry | None


@dataclass(slots=True, eq=False)
class Trace:
    """The times at which items of one forward pass were saved and used (`time.perf_counter`)."""

    started_at: float = field(default_factory=perf_counter)
    #: The thread of the forward pass.
    thread: int = field(default_factory=get_ident)
    saved_at: list[float] = field(default_factory=list)
    #: Bytes of each item; seconds that forward waited for room in total, and until each item.
    sizes: list[int] = field(default_factory=list)
    held: float = 0.0
    held_at: list[float] = field(default_factory=list)
    #: Bytes of all items so far, and of those that were offloaded.
    saved_bytes: int = 0
    left_bytes: int = 0
    #: A hash of the kinds of items up to each item: the kind of pass so far.
    prefixes: list[int] = field(default_factory=list)
    #: (item, time of first use, seconds that backward had waited until then)
    uses: list[tuple[int, float, float]] = field(default_factory=list)
    #: Seconds that backward waited for bytes.
    waited: float = 0.0
    #: Whether items left of which nothing was known, so that a device had to wait for them.
    is_trial: bool = False
    #: Number of uses that the history has learned.
    learned: int = 0
    #: By prefix: seconds from the start until which offloaded items stayed in memory because others
    #: referenced them, without those for which training had waited; 0 if nobody did.
    held_until: dict[int, float] = field(default_factory=dict)
    #: Bytes of items in memory, loaded ahead or not, after each save and after each of the `uses`.
    memory_saved: list[int] = field(default_factory=list)
    memory_used: list[int] = field(default_factory=list)
    #: Whether an accelerator computes the pass, and its events if it is timed; [Note: clocks].
    on_device: bool = False
    device_times: DeviceTimes | None = None
    _storages: list[StorageReference] = field(default_factory=list)
    # Storages are freed on any thread; appending to a deque runs no Python code.
    _died: deque[Any] = field(default_factory=deque)
    _alive_bytes: int = 0
    _looked_at: float = 0.0

    @property
    def signature(self) -> int:
        """The hash of the kinds of all items: the kind of pass."""
        return self.prefixes[-1] if self.prefixes else 0

    def prefix_with(self, tensor: torch.Tensor) -> int:
        """Return the hash of the pass with this tensor as its next item."""
        return hash((self.signature, tensor.ndim, tensor.dtype))

    @property
    def seconds(self) -> float:
        """Seconds from the start of the forward pass to the last use of an item."""
        return self.uses[-1][1] - self.started_at if self.uses else 0.0

    @property
    def computing_seconds(self) -> float:
        """Seconds from the start of the forward pass to the last use, without waits."""
        return max(0.0, self.seconds - self.held - self.waited)

    def saved(self, prefix: int, nbytes: int) -> int:
        """Record a new item with its `prefix_with`, and return its number."""
        if self.device_times is not None:
            self.device_times.forward.note()
        self.prefixes.append(prefix)
        self.sizes.append(nbytes)
        self.held_at.append(self.held)
        # Last, because its length is the number of items, and Ctrl-C may come between two lines.
        self.saved_at.append(perf_counter())
        return len(self.saved_at) - 1

    def used(self, number: int) -> None:
        """Record the first use of an item."""
        if self.device_times is not None:
            self.device_times.backward.note()
        self.uses.append((number, perf_counter(), self.waited))
        storage = self._storages[number]
        self._alive_bytes -= storage.nbytes
        storage.nbytes = 0

    def watch(self, number: int, storage: torch.UntypedStorage, nbytes: int) -> StorageReference:
        """Observe when the storage of an item is freed."""
        watched = StorageReference(storage, self._died.append)
        watched.number, watched.nbytes, watched.entry = number, nbytes, None
        self._storages.append(watched)
        self._alive_bytes += nbytes
        return watched

    def alive_bytes(self) -> int:
        """Return the bytes of items in memory that backward has not used, offloaded or not."""
        now = perf_counter()
        while self._died:
            dead: StorageReference = self._died.popleft()
            self._alive_bytes -= dead.nbytes
            dead.nbytes = 0
            entry, dead.entry = dead.entry, None
            if entry is not None and entry.written_at is not None:
                until = now - self.held - self.waited - self.started_at
                is_held = entry.written_at < self._looked_at
                self.held_until[self.prefixes[dead.number]] = until if is_held else 0.0
        self._looked_at = now
        return self._alive_bytes

    def resolve_times(self) -> bool:
        """Replace the host's times by the device's; return whether the times are right now."""
        if self.device_times is None:
            return not self.on_device
        forward, backward = self.device_times
        if not self.uses or not forward.over or not backward.over:
            return False
        start, (first, _) = self.started_at, forward.items[0]
        saved, self.held = forward.since(first)
        used, self.waited = backward.since(first)
        self.saved_at = [start + seconds for seconds, _ in saved]
        self.held_at = [held for _, held in saved]
        both = zip(self.uses, used, strict=False)  # Ctrl-C leaves one
        self.uses = [(number, start + after, waited) for (number, _, _), (after, waited) in both]
        self.on_device, self.device_times = False, None
        return True


@dataclass(slots=True)
class UseOrder:
    """The order in which backward uses the items of a forward pass."""

    #: Item numbers in the order of their first use.
    sequence: list[int]
    #: Seconds from the first use of any item to that of each, in the same order; none if unknown.
    due: list[float] = field(default_factory=list)
    position: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.position = {number: place for place, number in enumerate(self.sequence)}


class CachedBytes:
    """Loaded bytes, which are there for the stream that has asked for them."""

    __slots__ = ("_payload", "_stream", "_there")

    def __init__(self, payload: torch.Tensor) -> None:
        self._payload = payload
        self._stream: torch.Stream | None = None
        if is_asynchronous(payload.device):
            self._stream = current_stream(payload.device)
            self._there = self._stream.record_event()

    def here(self) -> torch.Tensor:
        """Return the bytes, for the current stream."""
        payload = self._payload
        if self._stream is not None:
            current = current_stream(payload.device)
            if current.stream_id != self._stream.stream_id:
                current.wait_event(self._there)
                payload.record_stream(current)
        return payload


@dataclass(slots=True, eq=False, weakref_slot=True)
class SavedItem:
    """A range of one storage, shared by every saved view; its ticket lives as long as they do."""

    record: ForwardRecord
    number: int
    span: range
    nbytes: int
    storage: StorageReference
    #: Version counter of the saved tensor.
    version: int
    #: None if the item is kept in memory, or is still in a batch.
    ticket: Ticket | None = None
    #: The bytes while they are in a batch, or where somebody has emptied their storage meanwhile.
    payload: torch.Tensor | None = None
    #: With `activations.verify`, the bytes that were written, where they were saved.
    original: torch.Tensor | None = None
    #: The loaded bytes while other views are still to be unpacked.
    cached: CachedBytes | None = None
    used: bool = False
    #: The packed tensors of these bytes; each has `unpacked`.
    views: list[weakref.ref[Any]] = field(default_factory=list)

    @property
    def is_emptied(self) -> bool:
        """Whether the storage of the payload has become too small for it."""
        payload = self.payload
        if payload is None:
            return False
        end = int(payload.storage_offset()) * payload.itemsize + self.nbytes
        return payload.untyped_storage().nbytes() < end

    @property
    def has_pending_views(self) -> bool:
        """Whether a view exists that was never unpacked."""
        views = (reference() for reference in self.views)
        return any(view is not None and not view.unpacked for view in views)

    @property
    def still_to_load(self) -> bool:
        """Whether a view is still to be unpacked and no load of its bytes has started."""
        stored = self.ticket is not None and self.ticket.state is TicketState.STORED
        return stored and self.cached is None and self.has_pending_views


@dataclass(slots=True, eq=False, weakref_slot=True)
class ForwardRecord:
    """The saved items of a micro-batch's forward pass, in order; it lives as long as the graph."""

    serial: int
    trace: Trace = field(default_factory=Trace)
    #: Bytes of kept items that backward has used.
    released_bytes: int = 0
    #: Bytes of offloaded items that are loaded or loading, and that backward has not used; of
    #: these, bytes that are copied to the device ahead of their use.
    loaded_bytes: int = 0
    staged_bytes: int = 0
    #: At how many of them to look again for what to load, or stage; at how much room for more to
    #: look for loads. If a load can wait: when it is due, and the bytes of it and those before.
    load_below: int = sys.maxsize
    stage_below: int = sys.maxsize
    load_room: int = 0
    can_wait: tuple[float, int] | None = None
    #: `TicketRegistry.lost_copies` at the last look.
    lost_copies: int = 0
    #: Bytes of the largest item.
    largest: int = 0
    #: The order in which to prefetch, and the places of offloaded items in it, ascending.
    plan: UseOrder = field(default_factory=lambda: UseOrder([]))
    _places: list[int] = field(default_factory=list)
    _items: list[weakref.ref[SavedItem]] = field(default_factory=list)
    _by_storage: dict[int, list[weakref.ref[SavedItem]]] = field(default_factory=dict)

    @property
    def in_backward(self) -> bool:
        """Whether backward has used an item."""
        return bool(self.trace.uses)

    @property
    def resident_bytes(self) -> int:
        """Bytes of loaded items in the memory of the device that computes."""
        return self.staged_bytes if self.trace.on_device else self.loaded_bytes

    def find(self, tensor: torch.Tensor, wanted: range) -> SavedItem | None:
        """Return the item that already has these bytes at this version, or None."""
        storage = tensor.untyped_storage()
        for reference in self._by_storage.get(storage._cdata, ()):
            item = reference()
            if (
                item is not None
                and item.version == tensor._version
                and covers(item.span, wanted)
                # Once changed, bytes are told by the counter of their base; others may lie between.
                and (not item.version or item.span in (wanted, reach_of_base(tensor, wanted)))
                and (wanted.start - item.span.start) % tensor.element_size() == 0
                and item.storage() is storage
            ):
                return item
        return None

    def add(self, tensor: torch.Tensor, span: range, prefix: int) -> SavedItem:
        """Add a range of a saved tensor's storage, with its `Trace.prefix_with`."""
        storage, nbytes = tensor.untyped_storage(), len(span)
        number = self.trace.saved(prefix, nbytes)
        self.largest = max(self.largest, nbytes)
        watched = self.trace.watch(number, storage, nbytes)
        item = SavedItem(self, number, span, nbytes, watched, tensor._version)
        reference = weakref.ref(item)
        self._items.append(reference)
        self._by_storage.setdefault(storage._cdata, []).append(reference)
        return item

    def items_of(self, storage: torch.UntypedStorage) -> list[SavedItem]:
        """Return the items that exist of a storage."""
        items = [reference() for reference in self._by_storage.get(storage._cdata, ())]
        return [item for item in items if item is not None and item.storage() is storage]

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
        self._places = [
            place
            for place, number in enumerate(plan.sequence)
            if (item := self.unused(number)) is not None and item.ticket is not None
        ]

    def upcoming(self, place: int) -> Iterator[tuple[int, SavedItem, Ticket]]:
        """Yield offloaded items after a place in the plan that were not used, with their places."""
        for position in range(bisect_right(self._places, place), len(self._places)):
            later = self._places[position]
            item = self.unused(self.plan.sequence[later])
            if item is not None and item.ticket is not None:
                yield later, item, item.ticket
