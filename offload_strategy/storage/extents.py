"""Page-aligned extents out of one region, with neighbours joined again when freed."""

from __future__ import annotations

from bisect import bisect_left
from typing import NamedTuple

from offload_strategy.units import PAGE_BYTES, round_up


class Extent(NamedTuple):
    """A page-aligned range of a space: `offset` and `nbytes` are multiples of the page size."""

    offset: int
    nbytes: int


class ExtentAllocator:
    """First fit over a sorted free list; not thread-safe (the space locks).

    First fit from the low end keeps the region short, and a step's tickets, which are written and
    freed in the same pattern every time, land in the same places again.

    Args:
        capacity: bytes that may be handed out in total; rounded down to the page.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // PAGE_BYTES * PAGE_BYTES
        self.used_bytes = 0
        #: End of the highest extent that was ever handed out and not given back.
        self.high_water = 0
        self._starts: list[int] = []
        self._sizes: dict[int, int] = {}

    @property
    def free_ranges(self) -> int:
        """How many separate free ranges lie below the high-water mark (its bookkeeping)."""
        return len(self._starts)

    def allocate(self, nbytes: int) -> Extent | None:
        """Hand out an extent of at least `nbytes`, or None when no range is large enough."""
        size = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        for index, start in enumerate(self._starts):
            free = self._sizes[start]
            if free < size:
                continue
            del self._sizes[start]
            if free == size:
                del self._starts[index]
            else:
                self._starts[index] = start + size
                self._sizes[start + size] = free - size
            self.used_bytes += size
            return Extent(start, size)
        if self.high_water + size > self.capacity:
            return None
        extent = Extent(self.high_water, size)
        self.high_water += size
        self.used_bytes += size
        return extent

    def free(self, extent: Extent) -> None:
        """Take an extent back and join it with free neighbours."""
        start, size = extent
        assert start + size <= self.high_water, "freed twice"
        index = bisect_left(self._starts, start)
        assert index == len(self._starts) or start + size <= self._starts[index], "freed twice"
        self.used_bytes -= size
        if index < len(self._starts) and self._starts[index] == start + size:
            size += self._sizes.pop(self._starts.pop(index))
        if index > 0:
            before = self._starts[index - 1]
            assert before + self._sizes[before] <= start, "freed twice"
            if before + self._sizes[before] == start:
                index -= 1
                self._starts.pop(index)
                size += self._sizes.pop(before)
                start = before
        if start + size == self.high_water:
            self.high_water = start
        else:
            self._starts.insert(index, start)
            self._sizes[start] = size
