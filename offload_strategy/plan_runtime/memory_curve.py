"""How much memory a step requires over its time, and how much of that is above a limit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence

from offload_strategy.plan_runtime.profile import TensorLife


class Pressure:
    """Bytes required from moment to moment; the step repeats.

    Args:
        tensors: that are in memory, unless they are moved.
        step_seconds: of a step.
        others: what else is required from a moment until the next: (seconds, bytes), rising.
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
        #: Begins of segments; the last one is the end of the step.
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
        """At most."""
        return max(self.levels, default=0)

    def add(self, begin: float, end: float, nbytes: int) -> None:
        """Require more, or fewer, between two moments, which may lie in the next step."""
        for first, last in self._within(begin, end):
            low, high = self._cut(first), self._cut(last)
            for place in range(low, high):
                self.levels[place] += nbytes

    def relief(self, begin: float, end: float, nbytes: int, limit: int) -> float:
        """What is gained above a limit if so many bytes are gone meanwhile, in byte seconds."""
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
        """The most that is required between two moments."""
        found = 0
        for first, last in self._within(begin, end):
            low = bisect_right(self.moments, first) - 1
            high = bisect_left(self.moments, last)
            found = max(found, max(self.levels[low:high], default=0))
        return found

    def since(self, begin: float, end: float, level: int) -> float:
        """The earliest moment from which until `end` no more than a level is required.

        Args:
            begin: it is no earlier.
            end: may lie in the next step.
            level: bytes.
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
        """The parts of a span that lie in one step each, as moments of the step."""
        if end - begin >= self._step:
            yield 0.0, self._step
            return
        turn = begin // self._step * self._step if self._step else 0.0
        begin, end = begin - turn, end - turn
        yield begin, min(end, self._step)
        if end > self._step:
            yield 0.0, end - self._step

    def _cut(self, moment: float) -> int:
        """The segment that begins at a moment, which is made if there is none."""
        place = bisect_left(self.moments, moment)
        if place == len(self.moments) or self.moments[place] != moment:
            self.moments.insert(place, moment)
            self.levels.insert(place, self.levels[place - 1])
        return place
