"""Prefetching for backward: in the learned order of use, and as late as is safe.

An item that is loaded early occupies memory for longer; training waits for one that is loaded late.
With learned times an item is loaded if, by the measured bandwidth with a margin, the next use of an
item would be too late to begin. The margin grows when backward had to wait, and shrinks slowly.

[Note: which pass is next]
Several passes may be in flight, and their backwards may run in any order: an interleaved pipeline
alternates between its stages, whose passes are of one kind. The number of passes between one
backward and the next repeats from step to step, so the next pass is looked up by the last few of
these distances; if these are new, by the pass that followed one of this kind the last time.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import OrderedDict, deque
from contextlib import nullcontext
from timeit import default_timer as perf_counter
from typing import Any

import torch

from offload_strategy.activations.budgets import Budget
from offload_strategy.activations.forward_records import (
    CachedBytes,
    ForwardRecord,
    SavedItem,
    Trace,
    UseOrder,
)
from offload_strategy.activations.tier_writes import batch_bytes
from offload_strategy.errors import OffloadError
from offload_strategy.io.bandwidth.estimator import RecentRate
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import TicketState
from offload_strategy.units import MiB, format_size

#: Largest number of prefetched bytes with `activations.prefetch: auto`, unless more were freed.
AUTO_BYTES = 32 * MiB
#: A shorter wait for a load does not count.
_WORTH_SECONDS = 0.001
#: Seconds of a load of any size: a thread must be woken while all cores compute.
_LATENCY_SECONDS = 0.003
_LEAST_MARGIN, _FIRST_MARGIN, _MOST_MARGIN = 1.5, 2.0, 16.0
#: Largest number of passes that wait for the device to tell their times.
_MOST_UNTIMED = 16
#: Bytes that are copied to the device ahead of their use, unless two of the largest item are more.
_STAGED_BYTES = 16 * MiB
#: When this share of what may be ahead was used, all of it is looked at again: at each use, that
#: would take longer than to move a small item.
_LOOKS = 4
#: Largest number of passes whose backward may have ended without using all of their items.
_MOST_OPEN = 64
#: Largest number of kinds of forward passes, and of their prefixes, that are remembered.
_MOST_PLANS = 64
_MOST_IDLE_TIMES = 65536
#: Number of distances by which the next pass is looked up, and of such rows.
_DISTANCES = 8
_MOST_FOLLOWING = 4096


class UseOrderHistory:
    """Use orders by kind of forward pass; the oldest are dropped."""

    def __init__(self) -> None:
        self._plans: OrderedDict[int, UseOrder] = OrderedDict()
        # By prefix of an item: for how long it is unused, and how long after the first is saved it
        # can leave.
        self._idle: OrderedDict[int, tuple[float, float]] = OrderedDict()
        self._following: OrderedDict[tuple[int, ...], int] = OrderedDict()
        self._distances: deque[int] = deque(maxlen=_DISTANCES)

    def learn(self, trace: Trace) -> None:
        """Learn from a trace."""
        trace.learned = len(trace.uses)
        first = trace.uses[0][1]
        sequence = [number for number, _, _ in trace.uses]
        due = [at - first - waited for _, at, waited in trace.uses]
        known = self._plans.get(trace.signature)
        if known is not None and known.sequence == sequence:
            # One slow step must not determine the loads of the next.
            due = [(old + new) / 2 for old, new in zip(known.due, due, strict=True)]
        _remember(self._plans, trace.signature, UseOrder(sequence, due), _MOST_PLANS)
        for number, at, waited in trace.uses:
            # It leaves when the operation that saved it is over: at the next save, at the latest.
            # In a pass that is not held, that is so much earlier.
            after = min(number + 1, len(trace.saved_at) - 1)
            leaves = trace.saved_at[after] - trace.held_at[after]
            times = (at - waited - trace.saved_at[number], leaves - trace.saved_at[0])
            _remember(self._idle, trace.prefixes[number], times, _MOST_IDLE_TIMES)

    def plan(self, trace: Trace) -> UseOrder:
        """Return the learned use order for a pass, or the reverse order of saving."""
        known = self._plans.get(trace.signature)
        if known is None:
            return UseOrder(list(range(len(trace.saved_at) - 1, -1, -1)))
        self._plans.move_to_end(trace.signature)
        return known

    def times(self, prefix: int) -> tuple[float | None, float | None]:
        """Return for how long such an item is unused, and how long after the first it can leave."""
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


def _remember(book: OrderedDict[Any, Any], key: Any, value: Any, most: int) -> None:
    book[key] = value
    book.move_to_end(key)
    while len(book) > most:
        book.popitem(last=False)


class Prefetcher:
    """Loads the items of all records: so many bytes ahead, or None to go by time; and learns."""

    def __init__(self, store: TensorStore, budget: Budget, limit_bytes: int | None) -> None:
        self._store = store
        self._budget = budget
        self._limit_bytes = limit_bytes
        self.history = UseOrderHistory()
        self._margin = _FIRST_MARGIN
        self._loads = RecentRate()
        self._last_load_end = 0.0
        self._alive: dict[int, weakref.ref[ForwardRecord]] = {}
        self._open: dict[int, Trace] = {}
        self._latest: tuple[int, Trace] | None = None
        # Passes that the host has launched, of which the device has not told all times.
        self._untimed: deque[Trace] = deque(maxlen=_MOST_UNTIMED)
        # Seconds from the last use of a pass to the next: the rest of backward, and all in between.
        self._tail = math.inf
        #: Items that were needed before their load started, and before it ended.
        self.missed_loads = 0
        self.late_loads = 0

    @property
    def latest_trace(self) -> Trace | None:
        """Trace of the pass that backward reached last, once it has used an item of it."""
        # If an exception ends a backward pass at its first item, its trace has no uses.
        return self._latest[1] if self._latest is not None and self._latest[1].uses else None

    def ended_at(self, trace: Trace) -> float:
        """Return when a pass has ended or will end with everything that follows its backward."""
        return min(perf_counter(), trace.uses[-1][1] + self._tail)

    def others_bytes(self, trace: Trace) -> int:
        """Return the bytes in memory of items of other passes."""
        records = [reference() for reference in list(self._alive.values())]
        return sum(
            record.trace.alive_bytes() + record.resident_bytes
            for record in records
            if record is not None and record.trace is not trace
        )

    def let_go(self, storage: torch.UntypedStorage) -> None:
        """Be done with the memory of a storage; see [Note: resized storages]."""
        for reference in list(self._alive.values()):
            record = reference()
            for item in () if record is None else record.items_of(storage):
                if item.ticket is not None:
                    self._store.let_go(item.ticket, storage)

    def add(self, record: ForwardRecord) -> None:
        """Add the record of a new forward pass."""
        for serial, alive in list(self._alive.items()):
            if alive() is None:
                self._alive.pop(serial, None)  # another thread may be faster
        self._alive[record.serial] = weakref.ref(record)
        if (latest := self.latest_trace) is not None:
            self._tail = record.trace.started_at - latest.uses[-1][1]
        self._learn_open(record.trace.thread)
        while self._untimed:
            try:
                trace = self._untimed.popleft()
            except IndexError:  # another thread was faster
                break
            if not trace.resolve_times():
                self._untimed.appendleft(trace)
                break
            self._learn_times(trace)

    # ------------------------------------------------------------------ uses
    def bytes_of(self, item: SavedItem) -> torch.Tensor:
        """Return the bytes of an offloaded item; `used` must be called after it."""
        trace = item.record.trace
        if not item.used:
            self._begin_use(item)
        ticket = item.ticket
        if ticket is None:
            assert item.payload is not None
            if item.is_emptied:
                raise OffloadError(
                    f"the storage of a saved tensor of {format_size(item.nbytes)} was emptied "
                    f"after forward, and not filled again before backward uses it"
                )
            return item.payload
        state, cached = ticket.state, item.cached
        absent = cached is None and state in (TicketState.STORED, TicketState.LOADING)
        if absent:
            if state is TicketState.STORED:
                self.missed_loads += 1
                self._store.prefetch(ticket)  # before prefetches
            # The wait for this item leaves time for that.
            self._fetch_ahead(item)
        begin = perf_counter()
        times = trace.device_times
        with nullcontext() if times is None else times.backward.wait():
            payload = self._store.get(ticket) if cached is None else cached.here()
            self._store.evict(ticket)
        # The bytes stay in memory only while other views are to be unpacked.
        others = len(item.views) > 1 and item.has_pending_views
        item.cached = (cached or CachedBytes(payload)) if others else None
        waited = perf_counter() - begin
        if absent and waited > _WORTH_SECONDS:
            self.late_loads += 1
            self._margin = min(_MOST_MARGIN, 1.3 * self._margin)
        if absent or waited > _WORTH_SECONDS:  # its write could not be cancelled
            trace.waited += waited
        if ticket.entry.load_times is not None:
            begin, end = ticket.entry.load_times
            if end > self._last_load_end:
                self._loads.add(ticket.nbytes, end - max(begin, self._last_load_end))
                self._last_load_end = end
        return payload

    def used(self, item: SavedItem) -> None:
        """Note that backward used an item, and prefetch the next ones."""
        record = item.record
        if not item.used:
            self._begin_use(item)
            record.released_bytes += item.nbytes
        self._fetch_ahead(item)
        trace = record.trace
        if len(trace.uses) == len(trace.saved_at):
            self._learn(trace)
            self._open.pop(record.serial, None)

    def _begin_use(self, item: SavedItem) -> None:
        record, nbytes = item.record, item.nbytes
        if not record.in_backward:
            self._begin_backward(record)
        item.used = True
        record.trace.used(item.number)
        if item.ticket is not None:
            record.staged_bytes = max(0, record.staged_bytes - nbytes)
            if item.ticket.state is not TicketState.WRITING:
                record.loaded_bytes = max(0, record.loaded_bytes - nbytes)
        self._budget.uses(record.trace, record.resident_bytes, nbytes)
        record.trace.memory_used.append(record.trace.alive_bytes() + record.resident_bytes)

    def _begin_backward(self, record: ForwardRecord) -> None:
        self._learn_open(record.trace.thread)
        if self._latest is not None and self._latest[0] != record.serial:
            serial, trace = self._latest
            self.history.follows(trace, record.serial - serial)
        self._latest = (record.serial, record.trace)
        self._open[record.serial] = record.trace
        record.follow(self.history.plan(record.trace))
        leaving = self._budget.must_leave(record.trace)
        if leaving is not None:
            for ticket in record.tickets():
                if ticket.state is not TicketState.WRITING:
                    continue
                if leaving > 0:
                    leaving -= ticket.nbytes
                else:
                    self._store.cancel_write(ticket)
                    record.trace.left_bytes -= ticket.nbytes

    # ------------------------------------------------------------------ learning
    def _learn_open(self, thread: int) -> None:
        # Only what follows in the same thread shows that a backward has ended that uses not all
        # items (as with LoRA): passes of other threads may be in the middle of theirs.
        for serial, trace in list(self._open.items()):
            if trace.thread == thread:
                self._learn(trace)
            if len(self._open) > _MOST_OPEN:
                self._open.pop(serial, None)

    def _learn(self, trace: Trace) -> None:
        if trace.learned == len(trace.uses):
            return
        self._budget.observe(trace)
        if trace.on_device:
            trace.learned = len(trace.uses)
            if trace.device_times is not None:
                self._untimed.append(trace)
        else:
            self._learn_times(trace)

    def _learn_times(self, trace: Trace) -> None:
        self.history.learn(trace)
        self._budget.learn(trace)
        if trace.waited < _WORTH_SECONDS:
            self._margin = max(_LEAST_MARGIN, 0.97 * self._margin)

    # ------------------------------------------------------------------ fetching
    def _fetch_ahead(self, item: SavedItem) -> None:
        """Start the loads that cannot wait until backward uses its next item."""
        record = item.record
        place = record.plan.position.get(item.number)
        if place is None:
            return
        limit, room = self._limit_bytes, self._budget.room(record.trace)
        if limit is None:
            # Kept items that were used have freed memory; a device has its loads in host memory.
            ahead = 2 * record.largest if record.trace.on_device else AUTO_BYTES
            limit = max(AUTO_BYTES, ahead, record.released_bytes) if room is None else room
        looks = room is not None or self._may_load(record, place, limit)
        if looks and self._fetch(record, place, limit):
            self._fetch_next_record(record, limit - record.loaded_bytes)
        if record.trace.on_device and record.staged_bytes <= record.stage_below:
            staged = max(_STAGED_BYTES, 2 * record.largest)
            self._stage(record, place, staged if room is None else min(staged, room))

    def _may_load(self, record: ForwardRecord, place: int, limit: int) -> bool:
        """Return whether something has changed since `_fetch` looked for what to load."""
        loaded, lost = record.loaded_bytes, self._store.registry.lost_copies != record.lost_copies
        if lost or loaded <= record.load_below or limit - loaded >= record.load_room:
            return True
        if record.can_wait is None:
            return False
        times = record.plan.due
        return place + 1 >= len(times) or self._begin_at(*record.can_wait) <= times[place + 1]

    def _begin_at(self, due: float, nbytes: int) -> float:
        """Return when loads of so many bytes must begin in order to be over at `due`."""
        rate = self._loads.rate
        # At an unknown rate nothing can wait.
        return due - _LATENCY_SECONDS - self._margin * (nbytes / rate if rate else math.inf)

    def _fetch(self, record: ForwardRecord, place: int, limit: int) -> bool:
        """Prefetch items after a place; return whether those are all that are left."""
        due, occasion = record.plan.due, None
        if self._limit_bytes is None and place + 1 < len(due):
            occasion = due[place + 1]
        # See [Note: batches].
        together = batch_bytes(record.trace.saved_bytes)
        ahead = loading = begun_now = 0
        record.lost_copies, record.can_wait = self._store.registry.lost_copies, None
        all_here, has_room = False, True
        for later, item, ticket in record.upcoming(place):
            entry = ticket.entry
            if entry.state is TicketState.WRITING:
                continue  # still in memory
            nbytes = entry.nbytes
            # What was loaded when there was more room stays, and counts.
            loaded = entry.state is TicketState.LOADING or entry.is_copy
            if ahead and ahead + nbytes > limit and not loaded:
                break
            if entry.state is TicketState.STORED and item.still_to_load:
                along = 0 < begun_now <= together - nbytes and entry.one_block_at_a_time
                if ahead and not along and occasion is not None:
                    can_wait = due[later], loading + nbytes
                    if self._begin_at(*can_wait) > occasion:
                        record.can_wait = can_wait
                        break
                if not self._store.prefetch(ticket):
                    has_room = False
                    break
                begun_now += nbytes
            ahead += nbytes
            if entry.state is TicketState.LOADING:
                loading += nbytes
        else:
            all_here = True
        record.loaded_bytes = ahead
        record.load_below = sys.maxsize if not has_room else ahead // 2 if ahead else -1
        record.load_room = limit - ahead + limit // _LOOKS
        return all_here

    def _stage(self, record: ForwardRecord, place: int, room: int) -> None:
        """Start to copy the next items to the device, as far as they are in host memory."""
        staged, all_here, tickets = 0, True, []
        for _, item, ticket in record.upcoming(place):
            if item.has_pending_views:
                if staged + ticket.nbytes > room and ticket.entry.staged is None:
                    all_here = False
                    break
                staged += ticket.nbytes
                tickets.append(ticket)
        all_here = self._store.stage(tickets) and all_here
        record.staged_bytes = staged
        record.stage_below = -1 if all_here else max(staged // 2, staged - room // _LOOKS)

    def _fetch_next_record(self, record: ForwardRecord, room: int) -> None:
        """Prefetch the record whose backward is expected next, because this one is loaded."""
        distance = self.history.following(record.trace)
        reference = None if distance is None else self._alive.get(record.serial + distance)
        following = None if reference is None else reference()
        if following is None or following.in_backward:
            return
        for number in self.history.plan(following.trace).sequence:
            item = following.unused(number)
            if item is None or item.ticket is None:
                continue
            room -= item.ticket.nbytes
            if room < 0 or (item.still_to_load and not self._store.prefetch(item.ticket)):
                return
