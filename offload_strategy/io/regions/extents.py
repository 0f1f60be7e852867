"""The allocator of a region: page-aligned extents, merged with adjacent free ones when freed."""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from offload_strategy.host_memory.arena import FreeRanges
from offload_strategy.units import PAGE_BYTES, MiB, round_up

#: Extents of at least this size take the lowest address, smaller ones the best fit.
LARGE_BYTES = 8 * MiB
#: So many of the lowest free ranges are compared for the best fit.
_RANGES_TRIED = 64


class Extent(NamedTuple):
    """A page-aligned range of a region: `offset` and `nbytes` are multiples of the page size."""

    offset: int
    nbytes: int


class ExtentAllocator:
    """Best fit for small extents, first fit for large ones; not thread-safe.

    Small extents fill gaps and never split a large hole. Large extents take a low address, so that
    the tickets of a step, which are written one after the other, are adjacent. Steps that write and
    free in the same pattern get the same extents again. What is before `begin` is not allocated.
    """

    def __init__(self, capacity: int, begin: int = 0) -> None:
        self.capacity = capacity // PAGE_BYTES * PAGE_BYTES
        self.used_bytes = 0
        self._allocated: dict[int, int] = {}  # start -> size
        self._end = begin + self.capacity
        self._free = FreeRanges(self._end)
        if begin:
            self._free.take(0, begin)

    def allocate(self, nbytes: int) -> Extent | None:
        """Allocate an extent of at least `nbytes`, or None when no range is large enough."""
        size = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        large_enough = ((begin, end) for begin, end in self._free if end - begin >= size)
        fitting = list(islice(large_enough, 1 if size >= LARGE_BYTES else _RANGES_TRIED))
        if not fitting:
            return None
        start = fitting[0][0]
        if len(fitting) > 1:
            # What reaches the end was never used, or all behind it is free again: it comes last.
            start = min((end == self._end, end - begin, begin) for begin, end in fitting)[2]
        self._free.take(start, size)
        self.used_bytes += size
        self._allocated[start] = size
        return Extent(start, size)

    def free(self, extent: Extent) -> None:
        """Free an extent; adjacent free ranges become one."""
        assert self._allocated.get(extent.offset) == extent.nbytes, "freed twice"
        del self._allocated[extent.offset]
        self.used_bytes -= extent.nbytes
        self._free.take_back(*extent)
