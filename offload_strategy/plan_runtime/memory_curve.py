"""Memory that a step requires over time, and how much of it is above a limit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from offload_strategy.plan_runtime.profile import TensorLife


class MemoryCurve:
    """Required bytes over the time of a step that repeats.

    Args:
        tensors: Tensors that are in memory unless they are offloaded.
        step_seconds: Seconds of a step.
        others: Baseline memory as (seconds, bytes), in ascending order.
    """

    def __init__(
        self,
        tensors: tuple[TensorLife, ...],
        step_seconds: float,
        others: Sequence[tuple[float, int]] = (),
    ) -> None:
        self._step = step_seconds
        moments = {0.0, step_seconds}
        moments.update(moment for moment, _ in others if 0 <= moment <= step_seconds)
        for tensor in tensors:
            moments.update(moment for moment in tensor.uses if 0 <= moment <= step_seconds)
        #: Starts of segments, and the end of the step.
        self.moments = sorted(moments)
        self.levels = [0] * (len(self.moments) - 1)
        ends = [*(moment for moment, _ in others[1:]), step_seconds]
        for (begin, nbytes), end in zip(others, ends, strict=False):
            self.add(begin, end, nbytes)
        for tensor in tensors:
            if tensor.cyclic:
                self.add(0.0, step_seconds, tensor.nbytes)
            else:
                self.add(tensor.uses[0], tensor.uses[-1], tensor.nbytes)

    @property
    def peak_bytes(self) -> int:
        """The largest number of required bytes."""
        return max(self.levels, default=0)

    def add(self, begin: float, end: float, nbytes: int) -> None:
        """Add bytes (or subtract them) in a span, which may extend into the next step."""
        for first, last in self._within(begin, end):
            low, high = self._cut(first), self._cut(last)
            for place in range(low, high):
                self.levels[place] += nbytes

    def relief(self, begin: float, end: float, nbytes: int, limit: int) -> float:
        """Return the relief above a limit, in byte seconds, if so many bytes are gone in a span."""
        gained = 0.0
        moments, levels = self.moments, self.levels
        for first, last in self._within(begin, end):
            place = bisect_right(moments, first) - 1
            while place < len(levels) and moments[place] < last:
                above = levels[place] - limit
                if above > 0:
                    seconds = min(last, moments[place + 1]) - max(first, moments[place])
                    gained += (above if above < nbytes else nbytes) * seconds
                place += 1
        return gained

    def most(self, begin: float, end: float) -> int:
        """Return the largest number of required bytes in a span."""
        found = 0
        for first, last in self._within(begin, end):
            low = bisect_right(self.moments, first) - 1
            high = bisect_left(self.moments, last)
            found = max(found, max(self.levels[low:high], default=0))
        return found

    def since(self, begin: float, end: float, level: int) -> float:
        """Return the earliest time from which no more than `level` bytes are required until `end`.

        Args:
            begin: Lower bound of the result.
            end: End of the span, which may be in the next step.
            level: Bytes.
        """
        for first, last in reversed(list(self._within(begin, end))):
            beyond = end - last  # by how much these moments lie in another step
            place = bisect_left(self.moments, last) - 1
            while place >= 0 and self.moments[place + 1] > first:
                if self.levels[place] > level:
                    return max(begin, self.moments[place + 1] + beyond)
                place -= 1
            end = first + beyond
        return begin

    def _within(self, begin: float, end: float) -> Iterator[tuple[float, float]]:
        """Yield the parts of a span that lie in one step each, as times within the step."""
        if end - begin >= self._step:
            yield 0.0, self._step
            return
        offset = begin // self._step * self._step if self._step else 0.0
        begin, end = begin - offset, end - offset
        yield begin, min(end, self._step)
        if end > self._step:
            yield 0.0, end - self._step

    def _cut(self, moment: float) -> int:
        """Return the segment that starts at a time, splitting one if necessary."""
        place = bisect_left(self.moments, moment)
        if place == len(self.moments) or self.moments[place] != moment:
            self.moments.insert(place, moment)
            self.levels.insert(place, self.levels[place - 1])
        return place
