"""The allocator of a region: page-aligned extents, merged with adjacent free ones when freed."""

from __future__ import annotations

from bisect import bisect_left, insort
from itertools import islice
from typing import NamedTuple

from offload_strategy.units import PAGE_BYTES, MiB, round_up

#: Extents of at least this size take the lowest address, smaller ones the best fit.
LARGE_BYTES = 8 * MiB
#: After this many of the lowest large holes, a large extent takes the best fit, too.
_HOLES_TRIED = 32


class Extent(NamedTuple):
    """A page-aligned range of a region: `offset` and `nbytes` are multiples of the page size."""

    offset: int
    nbytes: int


class ExtentAllocator:
    """Best fit for small extents, first fit for large ones; not thread-safe.

    Small extents fill gaps and never split a large hole. Large extents take a low address, so that
    the tickets of a step, which are written one after the other, are adjacent. Steps that write and
    free in the same pattern get the same extents again.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity // PAGE_BYTES * PAGE_BYTES
        self.used_bytes = 0
        #: End of the highest allocated extent.
        self.high_water = 0
        self._allocated: dict[int, int] = {}  # start -> size
        self._holes: dict[int, int] = {}  # start -> size
        self._ends: dict[int, int] = {}  # end -> start, of the holes
        self._by_size: list[tuple[int, int]] = []  # sorted (size, start), of the holes
        self._large: list[int] = []  # sorted starts of the holes of LARGE_BYTES and more

    def allocate(self, nbytes: int) -> Extent | None:
        """Allocate an extent of at least `nbytes`, or None when no range is large enough."""
        size = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        start = self._find(size)
        if start is not None:
            hole = self._holes[start]
            self._remove(start)
            if hole > size:
                self._add(start + size, hole - size)
        elif self.high_water + size <= self.capacity:
            start = self.high_water
            self.high_water += size
        else:
            return None
        self.used_bytes += size
        self._allocated[start] = size
        return Extent(start, size)

    def free(self, extent: Extent) -> None:
        """Free an extent and merge it with adjacent free ranges."""
        start, size = extent
        assert self._allocated.get(start) == size, "freed twice"
        del self._allocated[start]
        self.used_bytes -= size
        end = start + size
        if end in self._holes:
            after = self._holes[end]
            self._remove(end)
            end += after
        if start in self._ends:
            before = self._ends[start]
            self._remove(before)
            start = before
        if end == self.high_water:
            self.high_water = start
        else:
            self._add(start, end - start)

    def _find(self, size: int) -> int | None:
        """Return the start of the hole to use."""
        if size >= LARGE_BYTES:
            for start in islice(self._large, _HOLES_TRIED):
                if self._holes[start] >= size:
                    return start
        at = bisect_left(self._by_size, (size, 0))
        return self._by_size[at][1] if at < len(self._by_size) else None

    def _add(self, start: int, size: int) -> None:
        self._holes[start] = size
        self._ends[start + size] = start
        insort(self._by_size, (size, start))
        if size >= LARGE_BYTES:
            insort(self._large, start)

    def _remove(self, start: int) -> None:
        size = self._holes.pop(start)
        del self._ends[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        if size >= LARGE_BYTES:
            del self._large[bisect_left(self._large, start)]
