"""Loads ahead of backward: in the learned order, and as late as is safe.

What is loaded early lies in memory for longer; what is loaded late is waited for. With learned
times an item is loaded when, by the measured bandwidth with a margin, the next occasion (the next
use of an item) would be too late. The margin grows when backward had to wait, and shrinks slowly.
"""

from __future__ import annotations

import time
import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING

from offload_strategy.activations.batcher import batch_bytes
from offload_strategy.activations.forward_records import WORTH_SECONDS, ForwardRecord, Slot
from offload_strategy.activations.use_order import OrderBook, Plan, Trace
from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Ticket, TicketState
from offload_strategy.units import MiB

if TYPE_CHECKING:
    from offload_strategy.activations.offload_budget import Budget

#: Bytes loaded ahead at most when `activations.prefetch` is auto, unless backward has freed more.
AUTO_BYTES = 32 * MiB
#: What a load takes, whatever its size: a thread must be woken while all cores compute.
_LATENCY_SECONDS = 0.003
_LEAST_MARGIN, _FIRST_MARGIN, _MOST_MARGIN = 1.5, 2.0, 16.0
#: Forward passes whose backward may have ended without using all of their items.
_MOST_OPEN = 64


class Prefetcher:
    """Fetches ahead for all records of one engine.

    Args:
        store: loads.
        budget: is told how each backward went.
        limit_bytes: how far ahead to load, whatever the time; None to go by time.
    """

    def __init__(self, store: TensorStore, budget: Budget, limit_bytes: int | None) -> None:
        self._store = store
        self._budget = budget
        self._limit_bytes = limit_bytes
        self._book = OrderBook()
        self._margin = _FIRST_MARGIN
        self._speed = _Speed()
        self._alive: dict[int, weakref.ref[ForwardRecord]] = {}
        self._open: dict[int, Trace] = {}
        self._latest: tuple[int, Trace] | None = None
        # Seconds from the last use of a pass to the next pass: what backward does after it, and all
        # that comes between two passes.
        self._tail: float | None = None
        #: Items that were asked for before their load began, and before it ended.
        self.missed_loads = 0
        self.late_loads = 0

    def idle_seconds(self, prefix: int) -> float | None:
        """How long an item lies unused after such a beginning, if that is known."""
        return self._book.idle_seconds(prefix)

    @property
    def latest_trace(self) -> Trace | None:
        """Of the forward pass that backward reached last, once it has used something of it."""
        # Where an exception ends a backward pass at its first item, nothing is known of it.
        return self._latest[1] if self._latest is not None and self._latest[1].uses else None

    def ended_at(self, trace: Trace) -> float:
        """When a pass, whose backward began, was over with all that belongs to it, or will be."""
        last_use = trace.uses[-1][1]
        since = time.perf_counter() - last_use
        return last_use + (since if self._tail is None else min(since, self._tail))

    def others_bytes(self, trace: Trace) -> int:
        """Bytes of items of passes other than one that are in memory."""
        nbytes = 0
        for reference in self._alive.values():
            record = reference()
            if record is not None and record.trace is not trace:
                nbytes += record.trace.alive_bytes() + record.loaded_bytes
        return nbytes

    # ------------------------------------------------------------------ the life of a record
    def add(self, record: ForwardRecord) -> None:
        """A forward pass begins."""
        for serial in [number for number, alive in self._alive.items() if alive() is None]:
            del self._alive[serial]
        self._alive[record.serial] = weakref.ref(record)
        latest = self.latest_trace
        if latest is not None:
            self._tail = record.trace.started_at - latest.uses[-1][1]
        self._learn_open()

    def begins(self, record: ForwardRecord) -> None:
        """Backward reaches a record."""
        self._learn_open()
        if self._latest is not None and self._latest[0] != record.serial:
            serial, trace = self._latest
            self._book.follows(trace, record.serial - serial)
        self._latest = (record.serial, record.trace)
        self._open[record.serial] = record.trace
        record.follow(self._book.plan(record.trace))
        leaving = self._budget.must_leave(record.trace)
        if leaving is not None:
            for ticket in record.tickets():
                if ticket.state is not TicketState.WRITING:
                    continue
                if leaving > 0:
                    leaving -= ticket.nbytes
                else:
                    self._store.recall(ticket)
                    record.trace.left_bytes -= ticket.nbytes

    def ended(self, record: ForwardRecord) -> None:
        """Backward has used every item of a record."""
        self._learn(record.trace)
        self._open.pop(record.serial, None)

    def _learn_open(self) -> None:
        # A backward that is over without having used every item (LoRA leaves some) is known by
        # what comes after it.
        for serial, trace in list(self._open.items()):
            self._learn(trace)
            if len(self._open) > _MOST_OPEN:
                del self._open[serial]

    def _learn(self, trace: Trace) -> None:
        if self._book.learn(trace):
            self._budget.observe(trace)
            if trace.waited < WORTH_SECONDS:
                self._margin = max(_LEAST_MARGIN, 0.97 * self._margin)

    # ------------------------------------------------------------------ what backward found
    def uses(self, record: ForwardRecord, slot: Slot) -> None:
        """An item is used for the first time."""
        nbytes = slot.range.nbytes
        if slot.leaves:
            record.loaded_bytes = max(0, record.loaded_bytes - nbytes)
        self._budget.uses(record.trace, record.loaded_bytes, nbytes)

    def missed(self) -> None:
        """An item was asked for whose load had not begun."""
        self.missed_loads += 1

    def waited(self, seconds: float) -> None:
        """An item was asked for that was not there."""
        if seconds > WORTH_SECONDS:
            self.late_loads += 1
            self._margin = min(_MOST_MARGIN, 1.3 * self._margin)

    def loaded(self, ticket: Ticket) -> None:
        """A load is over: note how long it took."""
        if ticket.load_times is not None:
            self._speed.add(ticket.nbytes, *ticket.load_times)

    # ------------------------------------------------------------------ fetching
    def fetch_ahead(self, record: ForwardRecord, slot: Slot) -> None:
        """Begin the loads that cannot wait until backward asks for its next item."""
        plan = record.plan
        place = None if plan is None else plan.position.get(slot.number)
        if plan is None or place is None:
            return
        limit = self._limit(record)
        record.loaded_bytes, all_here = self._fetch(record, plan, place, limit)
        if all_here:
            self._fetch_next_record(record, limit - record.loaded_bytes)

    def _fetch(self, record: ForwardRecord, plan: Plan, place: int, limit: int) -> tuple[int, bool]:
        """Fetch what comes after a place; bytes that are here or soon, and whether that is all."""
        occasion = None
        if self._limit_bytes is None and plan.due is not None and place + 1 < len(plan.due):
            occasion = plan.due[place + 1]
        # See [Note: a few at a time].
        together = batch_bytes(record.trace.saved_bytes)
        ahead = loading = begun_now = 0
        first = bisect_right(record.upcoming, place)
        for position in range(first, len(record.upcoming)):
            later = record.upcoming[position]
            item = record.unused(plan.sequence[later])
            if item is None or item.ticket is None:
                continue
            ticket = item.ticket
            if ticket.state is TicketState.WRITING:
                continue  # in memory as it is
            if ahead and ahead + ticket.nbytes > limit:
                return ahead, False
            begun = not item.still_to_load
            along = 0 < begun_now <= together - ticket.nbytes and ticket.entry.one_block_at_a_time
            if ahead and not (begun or along) and occasion is not None and plan.due is not None:
                seconds = self._speed.seconds(loading + ticket.nbytes)
                if seconds is not None and plan.due[later] - self._with_margin(seconds) > occasion:
                    return ahead, False
            if not begun:
                if not self._store.prefetch(ticket):
                    return ahead, False
                begun_now += ticket.nbytes
            ahead += ticket.nbytes
            if ticket.state is TicketState.LOADING:
                loading += ticket.nbytes
        return ahead, True

    def _fetch_next_record(self, record: ForwardRecord, room: int) -> None:
        """All of a record is here: begin with the one whose backward is expected next."""
        distance = self._book.following(record.trace)
        reference = None if distance is None else self._alive.get(record.serial + distance)
        following = None if reference is None else reference()
        if following is None or following.in_backward:
            return
        for number in self._book.plan(following.trace).sequence:
            item = following.unused(number)
            if item is None or item.ticket is None:
                continue
            room -= item.ticket.nbytes
            if room < 0 or (item.still_to_load and not self._store.prefetch(item.ticket)):
                return

    def _limit(self, record: ForwardRecord) -> int:
        if self._limit_bytes is not None:
            return self._limit_bytes
        room = self._budget.room(record.trace)
        if room is not None:
            return room
        # What stayed in memory and was used has made room.
        return max(AUTO_BYTES, record.released_bytes)

    def _with_margin(self, seconds: float) -> float:
        return _LATENCY_SECONDS + self._margin * seconds


class _Speed:
    """What loads took lately."""

    def __init__(self) -> None:
        self._nbytes = self._seconds = self._last_end = 0.0

    def add(self, nbytes: int, queued_at: float, finished_at: float) -> None:
        if finished_at <= self._last_end:
            return
        busy = finished_at - max(queued_at, self._last_end)
        self._last_end = finished_at
        self._nbytes = 0.9 * self._nbytes + nbytes
        self._seconds = 0.9 * self._seconds + busy

    def seconds(self, nbytes: int) -> float | None:
        return nbytes * self._seconds / self._nbytes if self._nbytes else None
