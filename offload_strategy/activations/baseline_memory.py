"""Baseline memory: what training has in memory besides saved tensors, between events of a pass.

[Note: baseline memory]
No trace contains weights, gradients, states and workspaces of kernels. Between two events (an item
is saved, an item is used) they take at most the peak of memory minus the items in it. Some passes
are measured from event to event, which takes a little time for each event. Later passes are
measured as a whole: the difference between the measured and the predicted peak is a *correction*
for all events, and the largest correction of the last passes counts. If it becomes large, the next
pass is measured from event to event again.

The peak of a process has memory of freed tensors in it, which the C library keeps for the next
ones. It is returned to the system whenever the process comes close to its limit, so only a peak
that is closer still than what grows meanwhile explains tells that a pass needs more. It is also
returned before an event is measured, and so are idle buffers, which are unmapped near a limit as
well. As the next tensors then take page faults, this happens in the first measured passes, and in
seldom ones later: the baseline memory of kinds of passes that come in between is larger than it
need be.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from offload_strategy.host_memory.idle_memory import FULL_SHARE
from offload_strategy.host_memory.memory_limits import PeakMeter
from offload_strategy.host_memory.pool import IDLE_SHARE
from offload_strategy.units import MiB

#: Number of last passes of which the largest correction counts.
_PASSES = 4
#: Events that are remembered.
_MOST_EVENTS = 131072
#: Share of the peak that the correction may reach before a pass is measured per event.
_CLOSE_SHARE = 0.03
#: Least number of passes between two that are measured per event, because that takes time.
_CLOSE_EVERY = 16
#: Bytes that memory of freed tensors may have when an event is measured: a share of what is in use
#: at the start of the pass, however far the limit is, and a least number.
_FREED_SHARE, _FREED_BYTES = 0.03, 16 * MiB
#: The event with which a pass starts.
BEGIN = 0


class BaselineMemory:
    """See [Note: baseline memory]; the first `passes` passes are measured per event.

    `trim` returns the memory of idle buffers but for so many bytes.
    """

    def __init__(
        self, meter: PeakMeter, passes: int, limit_bytes: int, trim: Callable[[int], None]
    ) -> None:
        self.meter = meter
        self._trim = trim
        self._limit_bytes = limit_bytes
        # Passes to measure per event, those of them that return freed memory in any case, and
        # passes since the last that did so.
        self._close, self._returning, self._since_returned = passes, passes + 1, 0
        #: Bytes between an event and the next one, by event.
        self._levels: dict[int, int] = {}
        self._corrections: deque[int] = deque(maxlen=_PASSES)
        # By how much peaks were larger that count as needed in no event.
        self._kept: deque[int] = deque(maxlen=_PASSES)
        # Bytes in use at the start of the pass in which the levels were measured.
        self._base: int | None = None
        self.begin(0)

    def begin(self, items: int) -> None:
        """Start a pass, with so many bytes of other passes' items in memory."""
        #: Whether the current pass is measured from event to event.
        self.per_event = self._close > 0
        self._since_returned += 1
        returns = False
        if self.per_event:
            self._close -= 1
            self._returning -= 1
            returns = self._returning >= 0 or self._since_returned > _CLOSE_EVERY
            if returns:
                self._since_returned = 0
            if len(self._levels) > _MOST_EVENTS:
                self._levels.clear()
        self._returns = returns and self.meter.counts_host_buffers
        # Bytes in use at its start, and how many more than at the start of the measured pass.
        self._used = self.meter.needed_bytes() - items
        self._shift = 0 if self._base is None else self._used - self._base
        # Its peak as predicted and as measured, and whether the levels of all events are known.
        self._predicted_bytes = self._seen = 0
        self._complete = True
        self._event = BEGIN
        self.resume(items)

    @property
    def correction(self) -> int:
        """Bytes in use beyond those of the events; negative if fewer are in use."""
        return max(max(self._corrections, default=0), self._shift)

    @property
    def kept_bytes(self) -> int:
        """Most bytes of freed tensors that the C library had at the peaks of the last passes."""
        return max(self._kept, default=0)

    def after(self, event: int | None) -> int:
        """Return the baseline memory from an event to the next; the largest if it is unknown."""
        levels = (self._levels[event],) if event in self._levels else self._levels.values()
        return max(0, max(levels, default=0) + self.correction)

    def look(self) -> int:
        """Return the peak of the current pass so far; others may reset the meter after this."""
        self._seen = max(self._seen, self.meter.peak_bytes())
        return self._seen

    def end(self, items: int) -> int:
        """End a pass and what followed, with so many bytes of items; return its peak in bytes."""
        peak = self.look()
        self.record_event(BEGIN, items)
        if self.per_event:
            self._corrections.clear()
            self._base, self._shift = self._used, 0
        elif not self._complete:
            self._close = 1  # a pass of another kind
        else:
            more = beyond_prediction = peak - self._predicted_bytes
            if self.meter.counts_freed and more > 0:
                # As much as it takes to come no closer to the limit.
                beyond = peak - int(FULL_SHARE * self._limit_bytes)
                more = min(more, max(0, max(self._corrections, default=0) + beyond))
            self._corrections.append(more)
            self._kept.append(beyond_prediction - more)
            far = abs(max(self._corrections)) > _CLOSE_SHARE * peak
            if far and self._since_returned >= _CLOSE_EVERY:
                self._close = 1
        return peak

    def measure_next_pass(self) -> None:
        """Measure the next pass from event to event."""
        self._close = 1

    def record_event(self, event: int, items: int) -> None:
        """Record that an item is saved or used, with the bytes of items in memory until now."""
        # Items that are being written may be gone at the peak.
        items = min(self._items, items)
        if self.per_event:
            peak = self.meter.peak_bytes()
            self._seen = max(self._seen, peak)
            self._levels[self._event] = max(0, peak - items)
        level = self._levels.get(self._event)
        self._complete &= level is not None
        self._predicted_bytes = max(self._predicted_bytes, (level or 0) + items)
        self._event = event

    def resume(self, items: int) -> None:
        """Continue with so many bytes of items in memory."""
        self._items = items
        if self._returns:
            self._trim(int(IDLE_SHARE * self._used))
            self.meter.return_freed(max(_FREED_BYTES, int(_FREED_SHARE * self._used)))
        if self.per_event or self._event == BEGIN:
            self.meter.reset_peak()
