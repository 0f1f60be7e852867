"""The order and the times in which backward uses saved tensors, learned from earlier passes.

[Note: items, traces and use orders]
An *item* is one range of one storage that autograd saved and that could be offloaded, whether it
was or not; items are numbered in the order of saving. The *trace* of a forward pass records when
each item was saved, and when backward first used it. Forward passes that save the same kinds of
items in the same order (whatever their sizes: sequences vary in length) share a *use order*: the
order of first uses and their times, without the time that backward waited for bytes. A pass of a
new kind is assumed to use items in the reverse order of saving, at unknown times.

[Note: which pass is next]
Several passes may be in flight, and their backwards may run in any order: an interleaved pipeline
alternates between its stages, whose passes are of one kind. The number of passes between one
backward and the next repeats from step to step, so the next pass is looked up by the last few of
these distances; if these are new, by the pass that followed one of this kind the last time.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from offload_strategy.activations.block_calls import BlockCalls
from offload_strategy.activations.device_times import DeviceTimes
from offload_strategy.store.ticket import Entry

_K = TypeVar("_K")
_T = TypeVar("_T")

#: Largest number of kinds of forward passes, and of their prefixes, that are remembered.
_MOST_PLANS = 64
_MOST_IDLE_TIMES = 65536
#: Number of distances by which the next pass is looked up, and of such rows.
_DISTANCES = 8
_MOST_FOLLOWING = 4096


@dataclass(slots=True)
class UseOrder:
    """The order in which backward uses the items of a forward pass.

    Args:
        sequence: Item numbers in the order of their first use.
        due: Seconds from the first use of any item to that of each, in the same order; None if
            unknown.
    """

    sequence: list[int]
    due: list[float] | None = None
    position: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.position = {number: place for place, number in enumerate(self.sequence)}


class StorageReference(weakref.ref[torch.UntypedStorage]):
    """A weak reference to the storage of an item.

    Others may keep the storage alive: an offloaded item stays in memory as long as a model or an
    output references it.
    """

    __slots__ = ("entry", "nbytes", "number")

    number: int
    nbytes: int
    #: The store's entry, once the item is offloaded.
    entry: Entry | None


class Trace:
    """The times at which items of one forward pass were saved and used (`time.perf_counter`)."""

    __slots__ = (
        "_alive_bytes",
        "_died",
        "_looked_at",
        "_storages",
        "blocks",
        "device_times",
        "held",
        "held_at",
        "held_until",
        "learned",
        "left_bytes",
        "on_device",
        "prefixes",
        "saved_at",
        "saved_bytes",
        "sizes",
        "started_at",
        "uses",
        "waited",
    )

    def __init__(self) -> None:
        self.started_at = time.perf_counter()
        self.saved_at: list[float] = []
        #: Bytes of each item; seconds that forward waited for room in total, and until each item.
        self.sizes: list[int] = []
        self.held = 0.0
        self.held_at: list[float] = []
        #: Bytes of all items so far, and of those that were offloaded.
        self.saved_bytes = 0
        self.left_bytes = 0
        #: A hash of the kinds of items up to each item: the kind of pass so far.
        self.prefixes: list[int] = []
        #: (item, time of first use, seconds that backward had waited until then)
        self.uses: list[tuple[int, float, float]] = []
        #: Seconds that backward waited for bytes.
        self.waited = 0.0
        #: Number of uses that the history has learned.
        self.learned = 0
        #: Until when offloaded items stayed in memory because others referenced them, without the
        #: seconds for which training had waited; None if nobody did.
        self.held_until: dict[int, float | None] = {}
        #: Calls of blocks that may be recomputed.
        self.blocks = BlockCalls()
        #: Whether an accelerator computes the pass, and its events if the pass is timed by it.
        self.on_device = False
        self.device_times: DeviceTimes | None = None
        self._storages: list[StorageReference] = []
        # Storages are freed on any thread; appending to a deque runs no Python code.
        self._died: deque[weakref.ref[torch.UntypedStorage]] = deque()
        self._alive_bytes = 0
        self._looked_at = 0.0

    def computed_by(self, device: torch.device, *, timed: bool) -> None:
        """Record that an accelerator computes this pass; see [Note: clocks]."""
        self.on_device = True
        self.device_times = DeviceTimes(device) if timed else None

    def resolve_times(self) -> bool:
        """Replace the host's times by the device's; return whether the times are right now."""
        times = self.device_times
        if times is None:
            return not self.on_device
        if not self.uses or not times.over:
            return False
        start = self.started_at
        self.saved_at = [start + seconds for seconds in times.saved_after()]
        self.held_at = [0.0] * len(self.saved_at)
        self.held, self.waited = 0.0, times.waited()
        numbers = [number for number, _, _ in self.uses]
        self.uses = [
            (number, start + seconds, waited)
            for number, (seconds, waited) in zip(numbers, times.used_after(), strict=True)
        ]
        self.on_device, self.device_times = False, None
        return True

    def saved(self, prefix: int, nbytes: int) -> int:
        """Record a new item with its `prefix_with`, and return its number."""
        if self.device_times is not None:
            self.device_times.saved()
        self.prefixes.append(prefix)
        self.sizes.append(nbytes)
        self.held_at.append(self.held)
        # Last, because its length is the number of items, and Ctrl-C may come between two lines.
        self.saved_at.append(time.perf_counter())
        return len(self.saved_at) - 1

    def watch(self, number: int, storage: torch.UntypedStorage, nbytes: int) -> StorageReference:
        """Observe when the storage of an item is freed."""
        watched = StorageReference(storage, self._died.append)
        watched.number, watched.nbytes, watched.entry = number, nbytes, None
        self._storages.append(watched)
        self._alive_bytes += nbytes
        return watched

    def alive_bytes(self) -> int:
        """Return the bytes of items in memory that backward has not used, offloaded or not."""
        now = time.perf_counter()
        while self._died:
            dead = self._died.popleft()
            assert isinstance(dead, StorageReference)
            self._alive_bytes -= dead.nbytes
            dead.nbytes = 0
            entry = dead.entry
            if entry is not None and entry.written_at is not None:
                held = entry.written_at < self._looked_at
                self.held_until[dead.number] = (now - self.held - self.waited) if held else None
                dead.entry = None
        self._looked_at = now
        return self._alive_bytes

    def prefix_with(self, tensor: torch.Tensor) -> int:
        """Return the hash of the pass with this tensor as its next item."""
        return hash((self.signature, tensor.ndim, tensor.dtype))

    def used(self, number: int) -> None:
        """Record the first use of an item."""
        if self.device_times is not None:
            self.device_times.used()
        self.uses.append((number, time.perf_counter(), self.waited))
        storage = self._storages[number]
        self._alive_bytes -= storage.nbytes
        storage.nbytes = 0

    @property
    def signature(self) -> int:
        """The hash of the kinds of all items: the kind of pass."""
        return self.prefixes[-1] if self.prefixes else 0

    @property
    def complete(self) -> bool:
        """Whether every item was used."""
        return len(self.uses) == len(self.saved_at)

    @property
    def seconds(self) -> float:
        """Seconds from the start of the forward pass to the last use of an item."""
        return self.uses[-1][1] - self.started_at if self.uses else 0.0


class UseOrderHistory:
    """Use orders by kind of forward pass; the oldest are dropped."""

    def __init__(self) -> None:
        self._plans: OrderedDict[int, UseOrder] = OrderedDict()
        # By prefix of an item: for how long it is unused, and how long after the first it is saved.
        self._idle: OrderedDict[int, tuple[float, float]] = OrderedDict()
        self._following: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._distances: deque[int] = deque(maxlen=_DISTANCES)

    def learn(self, trace: Trace) -> bool:
        """Learn from a trace; return False if it has nothing new."""
        if len(trace.uses) == trace.learned:
            return False
        trace.learned = len(trace.uses)
        first = trace.uses[0][1]
        sequence = [number for number, _, _ in trace.uses]
        due = [at - first - waited for _, at, waited in trace.uses]
        known = self._plans.get(trace.signature)
        if known is not None and known.due is not None and known.sequence == sequence:
            # One slow step must not determine the loads of the next.
            due = [(old + new) / 2 for old, new in zip(known.due, due, strict=True)]
        _remember(self._plans, trace.signature, UseOrder(sequence, due), _MOST_PLANS)
        for number, at, waited in trace.uses:
            saved = trace.saved_at[number]
            times = (at - waited - saved, saved - trace.saved_at[0])
            _remember(self._idle, trace.prefixes[number], times, _MOST_IDLE_TIMES)
        return True

    def plan(self, trace: Trace) -> UseOrder:
        """Return the learned use order for a pass, or the reverse order of saving."""
        known = self._plans.get(trace.signature)
        if known is not None:
            self._plans.move_to_end(trace.signature)
            return known
        return UseOrder(list(range(len(trace.saved_at) - 1, -1, -1)))

    def times(self, prefix: int) -> tuple[float | None, float | None]:
        """Return what is known of the last item of such a prefix.

        Returns:
            Seconds for which it was unused, and seconds from the first save of its pass to its own;
            None if unknown.
        """
        return self._idle.get(prefix, (None, None))

    def follows(self, trace: Trace, distance: int) -> None:
        """Learn by how many passes the next backward was later (or earlier)."""
        for row in ((), self._distances):  # see [Note: which pass is next]
            _remember(self._following, (trace.signature, *row), distance, _MOST_FOLLOWING)
        self._distances.append(distance)

    def following(self, trace: Trace) -> int | None:
        """Return by how many passes the pass of the next backward is later, or None."""
        known = self._following.get((trace.signature, *self._distances))
        return self._following.get((trace.signature,)) if known is None else known


def _remember(book: OrderedDict[_K, _T], key: _K, value: _T, most: int) -> None:
    book[key] = value
    book.move_to_end(key)
    while len(book) > most:
        book.popitem(last=False)
