"""What training has in memory beside saved tensors, from event to event of a pass.

[Note: what else there is]
Weights, gradients, states, and what kernels need for a moment are in no trace. Between two events
(an item is saved, an item is used) it is, at most, the peak of memory less the items in it.
Some passes are looked at from event to event; that takes a little time each. Passes after them are
looked at as a whole: what the peak is above or below the one that these figures give is a
*correction* for all of them, and the most of the last passes counts. Where it becomes large, the
next pass is looked at from event to event again.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

#: Passes of which the one counts that needed most.
_PASSES = 4
#: Kinds of events that are remembered.
_MOST_EVENTS = 131072
#: Share of what there is by which the correction may grow before a pass is looked at closely.
_CLOSE_SHARE = 0.03
#: Passes between two that are looked at closely, so that this never costs much.
_CLOSE_EVERY = 16
#: The event with which a pass begins.
BEGIN = 0


class Meter(Protocol):
    """Tells how much memory there was in use."""

    @property
    def counts_host_buffers(self) -> bool:
        """Whether buffers in host memory are of this memory."""

    def start_over(self) -> None:
        """Forget what was."""

    def peak_bytes(self) -> int:
        """At most, since then."""

    def used_bytes(self) -> int:
        """At this moment."""

    def total_bytes(self) -> int:
        """What there is in all."""


class MemoryBeside:
    """See [Note: what else there is].

    Args:
        meter: of the memory.
        passes: how many to look at closely, to begin with.
    """

    def __init__(self, meter: Meter, passes: int) -> None:
        self._meter = meter
        self._close = passes
        self._since_close = 0
        #: Whether the present pass is looked at from event to event.
        self.closely = False
        #: By event: bytes until the next one.
        self._levels: dict[int, int] = {}
        self._event = BEGIN
        # Of the present pass: items since the last event, the peak as it is predicted and was seen.
        self._items = 0
        self._predicted_bytes = self._seen = 0
        self._complete = True
        self._corrections: deque[int] = deque(maxlen=_PASSES)
        # In use when a pass begins: as it was for these figures, and for the present one.
        self._base: int | None = None
        self._used = 0
        self._shift = 0

    @property
    def correction(self) -> int:
        """Bytes by which memory is fuller than the figures of events say; negative for emptier."""
        return max(max(self._corrections, default=0), self._shift)

    @property
    def most_bytes(self) -> int:
        """Beside items, at most."""
        return max(0, max(self._levels.values(), default=0) + self.correction)

    def after(self, event: int) -> int:
        """Bytes beside items from an event until the next; the most of all if it is not known."""
        known = self._levels.get(event)
        return self.most_bytes if known is None else max(0, known + self.correction)

    def look(self) -> int:
        """The peak of the present pass so far; others may start the meter over after it."""
        self._seen = max(self._seen, self._meter.peak_bytes())
        return self._seen

    def end(self, items: int, *, learn: bool) -> int:
        """A pass, and what came after its backward, is over.

        Args:
            items: bytes in memory.
            learn: whether it tells anything: one without a backward does not.

        Returns:
            Its peak.
        """
        peak = self.look()
        if not learn:
            return peak
        self._note(items)
        if self.closely:
            self._corrections.clear()
            self._base, self._shift = self._used, 0
        elif not self._complete:
            self._close = 1  # a pass of another kind
        else:
            self._corrections.append(peak - self._predicted_bytes)
            far = abs(max(self._corrections)) > _CLOSE_SHARE * peak
            if far and self._since_close >= _CLOSE_EVERY:
                self._close = 1
        return peak

    def begin(self, items: int) -> None:
        """A pass begins, with so many bytes of other passes' items in memory."""
        self.closely = self._close > 0
        self._since_close += 1
        if self.closely:
            self._close -= 1
            self._since_close = 0
            if len(self._levels) > _MOST_EVENTS:
                self._levels.clear()
        self._used = self._meter.used_bytes() - items
        self._shift = 0 if self._base is None else self._used - self._base
        self._predicted_bytes = self._seen = 0
        self._complete = True
        self._event = BEGIN
        self.go_on(items)

    def look_closely(self) -> None:
        """At the next pass."""
        self._close = max(self._close, 1)

    def arrive(self, event: int, items: int) -> None:
        """An item is saved or used; so many bytes of items were in memory until now."""
        self._note(items)
        self._event = event

    def go_on(self, items: int) -> None:
        """So many bytes of items are in memory from now on."""
        self._items = items
        if self.closely or self._event == BEGIN:
            self._meter.start_over()

    def _note(self, items: int) -> None:
        # What is written meanwhile may be gone when the peak comes.
        items = min(self._items, items)
        if self.closely:
            peak = self._meter.peak_bytes()
            self._seen = max(self._seen, peak)
            self._levels[self._event] = max(0, peak - items)
        level = self._levels.get(self._event)
        self._complete &= level is not None
        self._predicted_bytes = max(self._predicted_bytes, (level or 0) + items)
