"""What is taken over the time of a step: memory that it requires, and time of paths.

Planning looks for memory above a limit, and for time that paths have left for transfers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from offload_strategy.plan_runtime.profile import PathRates, TensorLife


class MemoryCurve:
    """Required bytes over a step: of tensors, and of baseline memory, as in `Profile.others`."""

    def __init__(
        self,
        tensors: tuple[TensorLife, ...],
        step_seconds: float,
        others: Sequence[tuple[float, int]] = (),
    ) -> None:
        #: Starts of segments, and the end of the step.
        self.moments = sorted({0.0, step_seconds})
        self.levels = [0] * (len(self.moments) - 1)
        ends = [*(moment for moment, _ in others[1:]), step_seconds]
        for (begin, nbytes), end in zip(others, ends, strict=False):
            self.add(begin, end, nbytes)
        for tensor in tensors:
            self.add(*tensor.uses, tensor.nbytes)

    @property
    def peak_bytes(self) -> int:
        """The largest number of required bytes."""
        return max(self.levels, default=0)

    def add(self, begin: float, end: float, nbytes: int) -> None:
        """Add bytes (or subtract them) in a span; what lies beyond the step does not count."""
        step = self.moments[-1]
        low, high = self._cut(min(begin, step)), self._cut(min(end, step))
        for place in range(low, high):
            self.levels[place] += nbytes

    def relief(self, begin: float, end: float, nbytes: int, limit: int) -> float:
        """Return the relief above a limit, in byte seconds, if so many bytes are gone in a span."""
        gained, moments, levels = 0.0, self.moments, self.levels
        place = bisect_right(moments, begin) - 1
        while place < len(levels) and moments[place] < end:
            if (above := levels[place] - limit) > 0:
                seconds = min(end, moments[place + 1]) - max(begin, moments[place])
                gained += (above if above < nbytes else nbytes) * seconds
            place += 1
        return gained

    def since(self, begin: float, end: float, level: int) -> float:
        """Return from when on, after `begin`, at most `level` bytes are required until `end`."""
        place = bisect_left(self.moments, end) - 1
        while place >= 0 and self.moments[place + 1] > begin:
            if self.levels[place] > level:
                return self.moments[place + 1]
            place -= 1
        return begin

    def _cut(self, moment: float) -> int:
        """Return the segment that starts at a time, splitting one if necessary."""
        place = bisect_left(self.moments, moment)
        if place == len(self.moments) or self.moments[place] != moment:
            self.moments.insert(place, moment)
            self.levels.insert(place, self.levels[place - 1])
        return place


class Timeline:
    """Reserved time of one direction of a path. Other transfers may interrupt a transfer.

    Times may be negative or beyond the end of a step: such a transfer comes too late.
    """

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def after(self, begin: float, seconds: float) -> float:
        """Return the earliest time at which so many free seconds have passed since `begin`."""
        now, left = begin, seconds
        for place in range(bisect_right(self._ends, begin), len(self._begins)):
            if (free := self._begins[place] - now) >= left:
                break
            left -= max(0.0, free)
            now = max(now, self._ends[place])
        return now + left

    def before(self, end: float, seconds: float) -> float:
        """Return the latest time from which so many free seconds pass until `end`."""
        now, left = end, seconds
        for place in range(bisect_left(self._begins, end) - 1, -1, -1):
            if (free := now - self._ends[place]) >= left:
                break
            left -= max(0.0, free)
            now = min(now, self._begins[place])
        return now - left

    def book(self, begin: float, end: float) -> None:
        """Reserve all free seconds of a span."""
        first, last = bisect_left(self._ends, begin), bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last], self._ends[first:last] = [begin], [end]


class BookedPath:
    """A path and its reserved time."""

    def __init__(self, rates: PathRates) -> None:
        self.rates = rates
        self.writes, self.reads = Timeline(), Timeline()

    def written(self, nbytes: int, begin: float) -> float:
        """Return when a tensor that may be written from `begin` on would be written."""
        return self.writes.after(begin, self.rates.seconds(nbytes, write=True))

    def read_from(self, nbytes: int, end: float) -> float:
        """Return when the read of a tensor must start that must be back at `end`."""
        return self.reads.before(end, self.rates.seconds(nbytes, write=False))
