"""What it costs training that items move: its own seconds for each byte, beside any waiting.

Hooks, copies in the kernel and calls of its drivers take time of the cores that compute, or of the
thread that launches kernels. Passes that look alike and move different amounts tell: computing
grows with what they move by so much for a byte.
"""

from __future__ import annotations

import statistics
from collections import OrderedDict, deque

from offload_strategy.activations.use_order import Trace

#: Kinds of passes that are remembered, and of each so many passes.
_MOST_KINDS, _PASSES = 8, 12
#: The first pass of a kind warms up caches, allocator and threads.
_WARM_UP = 1
#: Share of what a pass saves by which two must differ in what they move to tell anything.
_LEAST_DIFFERENCE = 0.15
#: Seconds per byte at most: more is a disturbance.
_MOST = 3e-9


class Toll:
    """Learned from passes whose backward is over."""

    def __init__(self) -> None:
        self._seen: OrderedDict[int, deque[tuple[int, float]]] = OrderedDict()
        self._cold: dict[int, int] = {}
        #: Seconds per byte that is written or read.
        self.per_byte = 0.0

    def observe(self, trace: Trace) -> None:
        """A pass is over."""
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
        """What it was in a pass."""
        return min(self.per_byte * moved_bytes(trace), 0.5 * computing_seconds(trace))


def moved_bytes(trace: Trace) -> int:
    """That a pass wrote and read."""
    return 2 * trace.left_bytes


def computing_seconds(trace: Trace) -> float:
    """From the begin of a pass to the last use, without waits."""
    return max(0.0, trace.seconds - trace.held - trace.waited)


def _slope(points: list[tuple[int, float]], least: float) -> float | None:
    """Of a line through the middle of what moved little, and of what moved much."""
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
