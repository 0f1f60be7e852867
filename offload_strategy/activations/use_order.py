"""In which order, and when, backward uses what forward saved: learned from the last time.

[Note: what is learned]
An *item* is one range of one storage that autograd saved and that could leave, whether it did or
not; items are numbered in the order of saving. The *trace* of a forward pass notes when each item
was saved, and when backward first used it. Forward passes that save the same kinds of items in the
same order (whatever their sizes: sequences vary in length) share a *plan*: the order of use and its
times, without the time that backward waited for bytes. A pass that does not look like any before
goes by the reverse order of saving, without times.

[Note: which pass is next]
Several passes may be in flight, and their backwards need not come in any simple order: an
interleaved pipeline goes back and forth between its stages, whose passes look alike. How many
passes lie between one backward and the next repeats from step to step, so what comes next is
looked up by the last few of these distances; where these were never seen, by what followed such a
pass the last time.
"""

from __future__ import annotations

import time
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from offload_strategy.activations.block_calls import BlockCalls
from offload_strategy.store.ticket import Entry

_K = TypeVar("_K")
_T = TypeVar("_T")

#: Kinds of forward passes, and of beginnings of them, that are remembered at most.
_MOST_PLANS = 64
_MOST_IDLE_TIMES = 65536
#: Distances by which the next pass is looked up, and how many such rows are remembered.
_DISTANCES = 8
_MOST_FOLLOWING = 4096


@dataclass(slots=True)
class Plan:
    """What backward did with the items of a forward pass.

    Args:
        sequence: item numbers in the order of their first use.
        due: seconds from the first use of all to that of each, in the same order; None if unknown.
    """

    sequence: list[int]
    due: list[float] | None = None
    position: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        self.position = {number: place for place, number in enumerate(self.sequence)}


class Storage(weakref.ref[torch.UntypedStorage]):
    """The storage of an item, which it does not keep alive.

    Others may: what left is in memory still, as long as a model or an output holds on to it.
    """

    __slots__ = ("entry", "nbytes", "number")

    number: int
    nbytes: int
    #: The store's, once the item has been given.
    entry: Entry | None


class Trace:
    """When the items of one forward pass were saved and used; times are of `time.perf_counter`."""

    __slots__ = (
        "_alive_bytes",
        "_died",
        "_looked_at",
        "_storages",
        "blocks",
        "held",
        "held_at",
        "held_until",
        "learned",
        "left_bytes",
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
        #: Bytes of each item; seconds that forward had waited for room in all, and until each.
        self.sizes: list[int] = []
        self.held = 0.0
        self.held_at: list[float] = []
        #: Bytes of all items so far, and of those that left.
        self.saved_bytes = 0
        self.left_bytes = 0
        #: A hash of the kinds of items up to and with each: what the pass looks like so far.
        self.prefixes: list[int] = []
        #: (item, time of first use, seconds that backward had waited until then)
        self.uses: list[tuple[int, float, float]] = []
        #: Seconds that backward waited for bytes.
        self.waited = 0.0
        #: How many of the uses the book has learned.
        self.learned = 0
        #: Until when items that left were in memory although they had been written, as others held
        #: on to them; without the seconds for which training had waited. None: nobody did.
        self.held_until: dict[int, float | None] = {}
        #: Where it is of interest (recompute.py).
        self.blocks = BlockCalls()
        self._storages: list[Storage] = []
        # Storages die on any thread; appending to a deque is no Python code.
        self._died: deque[weakref.ref[torch.UntypedStorage]] = deque()
        self._alive_bytes = 0
        self._looked_at = 0.0

    def saved(self, prefix: int, nbytes: int) -> int:
        """A new item, of which `prefix_with` has told what the pass looks like; its number."""
        self.prefixes.append(prefix)
        self.sizes.append(nbytes)
        self.held_at.append(self.held)
        # Last, as it counts items, and Ctrl-C may come between any two lines.
        self.saved_at.append(time.perf_counter())
        return len(self.saved_at) - 1

    def watch(self, number: int, storage: torch.UntypedStorage, nbytes: int) -> Storage:
        """Notice when the storage of an item dies."""
        watched = Storage(storage, self._died.append)
        watched.number, watched.nbytes, watched.entry = number, nbytes, None
        self._storages.append(watched)
        self._alive_bytes += nbytes
        return watched

    def alive_bytes(self) -> int:
        """Bytes of items that are in memory and that backward has not used, left or not."""
        now = time.perf_counter()
        while self._died:
            dead = self._died.popleft()
            assert isinstance(dead, Storage)
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
        """What the pass would look like with this tensor as its next item."""
        return hash((self.signature, tensor.ndim, tensor.dtype))

    def used(self, number: int) -> None:
        """An item was asked for, for the first time."""
        self.uses.append((number, time.perf_counter(), self.waited))
        storage = self._storages[number]
        self._alive_bytes -= storage.nbytes
        storage.nbytes = 0

    @property
    def signature(self) -> int:
        """What the pass looks like."""
        return self.prefixes[-1] if self.prefixes else 0

    @property
    def complete(self) -> bool:
        """Whether every item was used."""
        return len(self.uses) == len(self.saved_at)

    @property
    def seconds(self) -> float:
        """From the begin of the forward pass to the last use of an item."""
        return self.uses[-1][1] - self.started_at if self.uses else 0.0


class OrderBook:
    """The plans of the kinds of forward passes that were seen; the oldest are forgotten."""

    def __init__(self) -> None:
        self._plans: OrderedDict[int, Plan] = OrderedDict()
        self._idle: OrderedDict[int, float] = OrderedDict()
        self._following: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._distances: deque[int] = deque(maxlen=_DISTANCES)

    def learn(self, trace: Trace) -> bool:
        """Take over what a trace tells; False if it tells nothing new."""
        if len(trace.uses) == trace.learned:
            return False
        trace.learned = len(trace.uses)
        first = trace.uses[0][1]
        sequence = [number for number, _, _ in trace.uses]
        due = [at - first - waited for _, at, waited in trace.uses]
        known = self._plans.get(trace.signature)
        if known is not None and known.due is not None and known.sequence == sequence:
            # One slow step must not decide when the next one loads.
            due = [(old + new) / 2 for old, new in zip(known.due, due, strict=True)]
        _remember(self._plans, trace.signature, Plan(sequence, due), _MOST_PLANS)
        for number, at, waited in trace.uses:
            idle = at - waited - trace.saved_at[number]
            _remember(self._idle, trace.prefixes[number], idle, _MOST_IDLE_TIMES)
        return True

    def plan(self, trace: Trace) -> Plan:
        """The plan for a pass that has been saved: learned, or the reverse order of saving."""
        known = self._plans.get(trace.signature)
        if known is not None:
            self._plans.move_to_end(trace.signature)
            return known
        return Plan(list(range(len(trace.saved_at) - 1, -1, -1)))

    def idle_seconds(self, prefix: int) -> float | None:
        """How long the last item of such a beginning lay unused, or None if that is not known."""
        return self._idle.get(prefix)

    def follows(self, trace: Trace, distance: int) -> None:
        """Learn which pass's backward came after one's: so many passes later (or earlier)."""
        for row in ((), self._distances):  # see [Note: which pass is next]
            _remember(self._following, (trace.signature, *row), distance, _MOST_FOLLOWING)
        self._distances.append(distance)

    def following(self, trace: Trace) -> int | None:
        """How many passes later the pass began whose backward comes after this one's."""
        known = self._following.get((trace.signature, *self._distances))
        return self._following.get((trace.signature,)) if known is None else known


def _remember(book: OrderedDict[_K, _T], key: _K, value: _T, most: int) -> None:
    book[key] = value
    book.move_to_end(key)
    while len(book) > most:
        book.popitem(last=False)
