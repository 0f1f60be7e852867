"""Buffers of any size out of few large stretches of memory: an arena, and pinned slabs.

[Note: memory that stays]
The kernel fills fresh memory with zeros on the thread that touches it first, which takes a thread
longer than all else when it reads from a disk. Buffers that are recycled by size are fresh whenever
the budget is used up and another size is wanted. So buffers are ranges of one private mapping,
which serve any size. Only idle memory that has to go is given back to the system, by whole huge
pages, because a part of one would not become free.

[Note: pinned slabs]
To register memory with a device takes long and may wait for it, so it must not happen in every
step. A slab stays registered until the budget needs its memory for something else.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from bisect import bisect_right
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from offload_strategy.errors import OffloadError
from offload_strategy.host_memory.buffers import HostBuffer, Lent
from offload_strategy.units import PAGE_BYTES, MiB, round_up

#: What memory is taken and given back by: a huge page of most systems.
BLOCK_BYTES = 2 * MiB
#: Addresses, which cost nothing, for each byte that may be held: with room to spare, ranges that
#: are lent for long do not stand in the way of large ones.
_ADDRESSES = 2
#: Bytes of a slab: a share of the budget within these bounds, or one larger request.
_SHARE = 16
_LEAST_BYTES, _MOST_BYTES = 1 * MiB, 256 * MiB


class FreeRanges:
    """Begins and ends of what is not lent of `size` bytes, in order; no two touch each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranges = [(0, size)]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._ranges)

    def take(self, begin: int, size: int) -> None:
        """Take a part of a free range out of it."""
        at = bisect_right(self._ranges, (begin, self.size)) - 1
        low, high = self._ranges[at]
        around = [(low, begin), (begin + size, high)]
        self._ranges[at : at + 1] = [part for part in around if part[0] < part[1]]

    def take_back(self, begin: int, size: int) -> None:
        """Free a range; neighbours become one range again."""
        end, at = begin + size, bisect_right(self._ranges, (begin, self.size))
        assert at == 0 or self._ranges[at - 1][1] <= begin, "freed twice"
        if at < len(self._ranges) and self._ranges[at][0] == end:
            end = self._ranges.pop(at)[1]
        if at > 0 and self._ranges[at - 1][1] == begin:
            at -= 1
            begin = self._ranges.pop(at)[0]
        self._ranges.insert(at, (begin, end))


def create_arena(budget: int) -> Arena | None:
    """Return an arena, or None where the system does not allow it."""
    addresses = _ADDRESSES
    with contextlib.suppress(OSError):
        if Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
            addresses = 1  # the system counts mere addresses, too
    # Where memory can be given back at once.
    if sys.platform == "linux" and hasattr(mmap, "MADV_DONTNEED"):
        with contextlib.suppress(OffloadError, OverflowError, ValueError):
            return Arena(addresses * round_up(budget, BLOCK_BYTES))
    return None


class Arena:
    """Lends page-aligned ranges of `size` bytes, under a lock; OffloadError without addresses."""

    def __init__(self, size: int) -> None:
        self._memory = HostBuffer(size + BLOCK_BYTES)
        self.addresses = range(self._memory.address, self._memory.address + self._memory.nbytes)
        self._first = -self._memory.address % BLOCK_BYTES
        self._free = FreeRanges(size)
        # A byte for each block up to the last that was ever used: whether there is memory behind.
        self._there = bytearray()
        self.held_bytes = 0

    def acquire(self, nbytes: int, size: int, room: int) -> Lent | None:
        """Lend a range of `size` bytes, whole pages, for `nbytes`.

        Memory that is idle is taken first. Where more is needed than the `room` bytes by which
        `held_bytes` may grow, idle memory elsewhere goes back to the system. None without enough.
        """
        fresh, begin = min(self._places(size), default=(0, None))
        if begin is None:
            return None
        self._free.take(begin, size)
        missing = fresh - room
        if missing > 0:
            if self.idle_bytes() < missing:
                self._free.take_back(begin, size)
                return None
            self.give_up(missing)
        first, last = _touched(begin, size)
        self._there.extend(bytes(max(0, last - len(self._there))))
        self.held_bytes += self._fresh(begin, size)
        self._there[first:last] = b"\1" * (last - first)
        loan = self._memory.acquire(nbytes, self._first + begin)
        return Lent(*loan, size, partial(self._free.take_back, begin, size))

    def idle_bytes(self) -> int:
        """Memory that can go back to the system."""
        return sum(self._there.count(1, *blocks) for blocks in self._idle_blocks()) * BLOCK_BYTES

    def give_up(self, nbytes: int) -> None:
        """Give back so many bytes of idle memory, highest addresses first."""
        for blocks in reversed(self._idle_blocks()):
            while nbytes > 0 and (block := self._there.rfind(1, *blocks)) >= 0:
                self._give_back(block)
                nbytes -= BLOCK_BYTES

    def _places(self, size: int) -> list[tuple[int, int]]:
        """Where a range may begin, each with the bytes of memory that would be fresh."""
        places = []
        for begin, end in self._free:
            if end - begin >= size:
                places.append((self._fresh(begin, size), begin))
                if end < self._free.size:
                    places.append((self._fresh(end - size, size), end - size))
        return places

    def _fresh(self, begin: int, size: int) -> int:
        first, last = _touched(begin, size)
        return (last - first - self._there.count(1, first, last)) * BLOCK_BYTES

    def _idle_blocks(self) -> list[tuple[int, int]]:
        """Blocks of which nothing is lent, as ranges of numbers, some of them empty."""
        return [(-(-low // BLOCK_BYTES), high // BLOCK_BYTES) for low, high in self._free]

    def _give_back(self, block: int) -> None:
        self._there[block] = 0
        self.held_bytes -= BLOCK_BYTES
        self._memory.give_back(self._first + block * BLOCK_BYTES, BLOCK_BYTES)


def _touched(begin: int, size: int) -> tuple[int, int]:
    """The first block that a range has a part of, and the one after the last."""
    return begin // BLOCK_BYTES, -(-(begin + size) // BLOCK_BYTES)


class PinnedSlabs:
    """All slabs of a pool, of which `budget` bytes may be mapped; the caller holds a lock."""

    def __init__(self, budget: int) -> None:
        size = min(_MOST_BYTES, max(_LEAST_BYTES, budget // _SHARE))
        self._slab_bytes = round_up(size, PAGE_BYTES)
        self._slabs: list[tuple[HostBuffer, FreeRanges]] = []
        self.held_bytes = 0

    def acquire(self, nbytes: int, size: int, room: int) -> Lent | None:
        """Lend the smallest free range that fits, else a part of a new slab within `room`."""
        fitting = (
            (end - begin, number, begin)
            for number, (_, free) in enumerate(self._slabs)
            for begin, end in free
            if end - begin >= size
        )
        best = min(fitting, default=None)
        if best is not None:
            (slab, free), begin = self._slabs[best[1]], best[2]
        elif size <= room:
            most = max(size, min(self._slab_bytes, room // PAGE_BYTES * PAGE_BYTES))
            slab, free, begin = HostBuffer(most, pinned=True), FreeRanges(most), 0
            self._slabs.append((slab, free))
            self.held_bytes += most
        else:
            return None
        free.take(begin, size)
        return Lent(*slab.acquire(nbytes, begin), size, partial(free.take_back, begin, size))

    def idle_bytes(self) -> int:
        """Memory of slabs that is not lent."""
        return sum(end - begin for _, free in self._slabs for begin, end in free)

    def give_up(self, nbytes: int) -> None:
        """Unmap idle slabs until so many bytes are free, as far as possible."""
        for slab, free in list(self._slabs):
            if nbytes <= 0:
                return
            if list(free) == [(0, slab.nbytes)]:  # nothing of it is in use
                self._slabs.remove((slab, free))
                self.held_bytes -= slab.nbytes
                nbytes -= slab.nbytes
                slab.release()
