"""Computing time that is lost for each byte of I/O, in addition to waiting.

Hooks, copies in the operating system and its drivers take time from the cores that compute, or from
the thread that launches kernels. It is estimated from passes of the same kind that move different
amounts: the slope of computing time over moved bytes.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque

from offload_strategy.activations.use_order import Trace

#: Kinds of passes that are remembered, and passes of each kind.
_MOST_KINDS, _PASSES = 8, 12
#: The first passes of a kind warm up caches, allocator and threads.
_WARM_UP = 1
#: Passes count only if their moved bytes differ by this share of what they save.
_LEAST_DIFFERENCE = 0.15
#: Largest plausible seconds per byte; more is a disturbance.
_MOST = 3e-9


class IoOverhead:
    """The overhead, learned from passes whose backward has ended."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, deque[tuple[int, float]]] = OrderedDict()
        self._cold: dict[int, int] = {}
        #: Seconds per byte that is written or read.
        self.per_byte = 0.0

    def observe(self, trace: Trace) -> None:
        """Learn from a pass."""
        kind = trace.signature
        if self._cold.setdefault(kind, _WARM_UP) > 0:
            self._cold[kind] -= 1
            return
        passes = self._seen.setdefault(kind, deque(maxlen=_PASSES))
        self._seen.move_to_end(kind)
        passes.append((moved_bytes(trace), computing_seconds(trace)))
        while len(self._seen) > _MOST_KINDS:
            gone, _ = self._seen.popitem(last=False)
            del self._cold[gone]
        found = _slope(list(passes), _LEAST_DIFFERENCE * 2 * trace.saved_bytes)
        if found is not None:
            self.per_byte = min(max(0.0, found), _MOST)

    def seconds(self, trace: Trace) -> float:
        """Return the overhead of a pass in seconds."""
        return min(self.per_byte * moved_bytes(trace), 0.5 * computing_seconds(trace))


def moved_bytes(trace: Trace) -> int:
    """Return the bytes that a pass wrote and read."""
    return 2 * trace.left_bytes


def computing_seconds(trace: Trace) -> float:
    """Return the seconds from the start of a pass to the last use, without waits."""
    return max(0.0, trace.seconds - trace.held - trace.waited)


def _slope(points: list[tuple[int, float]], least: float) -> float | None:
    """Return the slope between the medians of the points with few and with many moved bytes."""
    amounts = [moved for moved, _ in points]
    half = (min(amounts) + max(amounts)) / 2
    low = [point for point in points if point[0] <= half]
    high = [point for point in points if point[0] > half]
    if not low or not high:
        return None
    apart = statistics.median(x for x, _ in high) - statistics.median(x for x, _ in low)
    if apart < max(1.0, least):
        return None
    return (statistics.median(y for _, y in high) - statistics.median(y for _, y in low)) / apart
