"""Time that transfers reserve on a path; later transfers see what is left."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from offload_strategy.plan_runtime.profile import PathRates


class Timeline:
    """Reserved time of one direction of a path. Other transfers may interrupt a transfer.

    Times may be negative or beyond the end of a step: a late transfer ends in the next step.
    """

    def __init__(self) -> None:
        self._begins: list[float] = []
        self._ends: list[float] = []

    def after(self, begin: float, seconds: float) -> float:
        """Return the earliest time at which so many free seconds have passed since `begin`."""
        now, left = begin, seconds
        for place in range(bisect_right(self._ends, begin), len(self._begins)):
            free = self._begins[place] - now
            if free >= left:
                break
            left -= max(0.0, free)
            now = max(now, self._ends[place])
        return now + left

    def before(self, end: float, seconds: float) -> float:
        """Return the latest time from which so many free seconds pass until `end`."""
        now, left = end, seconds
        for place in range(bisect_left(self._begins, end) - 1, -1, -1):
            free = now - self._ends[place]
            if free >= left:
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

    @property
    def busy_seconds(self) -> float:
        """Reserved seconds in total."""
        return sum(end - begin for begin, end in zip(self._begins, self._ends, strict=True))


class BookedPath:
    """A path and its reserved time.

    Args:
        rates: Rates of the path.
    """

    def __init__(self, rates: PathRates) -> None:
        self.rates = rates
        self.writes = Timeline()
        self.reads = self.writes if rates.simplex else Timeline()

    def write_seconds(self, nbytes: int) -> float:
        """Return the seconds of a write on an idle path."""
        return self.rates.latency + nbytes / self.rates.write

    def read_seconds(self, nbytes: int) -> float:
        """Return the seconds of a read on an idle path."""
        return self.rates.latency + nbytes / self.rates.read

    def away(self, nbytes: int, begin: float, end: float) -> tuple[float, float] | None:
        """Return when a tensor could be written and when its read must start, or None.

        Args:
            nbytes: Size of the tensor.
            begin: Time from which it may be written.
            end: Time at which it must be back.
        """
        gone = self.writes.after(begin, self.write_seconds(nbytes))
        back = self.reads.before(end, self.read_seconds(nbytes))
        return (gone, back) if gone < back else None

    def book(self, begin: float, gone: float, back: float, end: float) -> None:
        """Reserve the time of a transfer that `away` found."""
        self.writes.book(begin, gone)
        self.reads.book(back, end)
