"""Pinned memory in slabs: registered with the device once, and cut into ranges.

To register memory takes long and may wait for the device, so it must not happen in every step. A
slab stays registered until the budget needs its memory for something else.
"""

from __future__ import annotations

from typing import Any

import torch

from offload_strategy.host_memory.buffers import HostBuffer
from offload_strategy.units import PAGE_BYTES, MiB, round_up

#: Bytes of a slab: a share of the budget within these bounds, or one larger request.
_SHARE = 16
_LEAST_BYTES, _MOST_BYTES = 1 * MiB, 256 * MiB


class Slab:
    """One registered stretch of memory and its free ranges.

    Args:
        nbytes: Size in bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.buffer = HostBuffer(nbytes, pinned=True)
        # Free ranges in order of address, as begins and ends; no two touch each other.
        self._free = [(0, self.buffer.nbytes)]

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.buffer.nbytes

    @property
    def idle(self) -> bool:
        """Whether nothing of the slab is in use."""
        return self._free == [(0, self.nbytes)]

    def smallest_fit(self, nbytes: int) -> int | None:
        """Return the size of the smallest free range that serves a request, or None."""
        return min(
            (end - begin for begin, end in self._free if end - begin >= nbytes), default=None
        )

    def take(self, nbytes: int) -> int:
        """Take a range out of the smallest free one, and return where it begins."""
        size = self.smallest_fit(nbytes)
        place = next(i for i, (begin, end) in enumerate(self._free) if end - begin == size)
        begin, end = self._free.pop(place)
        if begin + nbytes < end:
            self._free.insert(place, (begin + nbytes, end))
        return begin

    def take_back(self, begin: int, nbytes: int) -> None:
        """Free a range; neighbours become one range again."""
        self._free.append((begin, begin + nbytes))
        merged: list[tuple[int, int]] = []
        for low, high in sorted(self._free):
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self._free = merged


class PinnedSlabs:
    """All slabs of a pool; the caller holds a lock.

    Args:
        budget: Bytes that may be mapped at a time.
    """

    def __init__(self, budget: int) -> None:
        size = min(_MOST_BYTES, max(_LEAST_BYTES, budget // _SHARE))
        self._slab_bytes = round_up(size, PAGE_BYTES)
        self._slabs: list[Slab] = []
        self.held_bytes = 0
        self.lent_bytes = 0

    def acquire(self, nbytes: int, room: int) -> tuple[torch.Tensor, Any, Slab, int] | None:
        """Return a tensor, the exporter that dies with its storage, and where its range is.

        Args:
            nbytes: Size in bytes.
            room: Bytes by which `held_bytes` may grow.

        Returns:
            None if no slab has such a range and a new one would be too large.
        """
        size = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        fitting = [
            (fit, i) for i, slab in enumerate(self._slabs) if (fit := slab.smallest_fit(size))
        ]
        if fitting:
            slab = self._slabs[min(fitting)[1]]
        elif size <= room:
            slab = Slab(max(size, min(self._slab_bytes, room // PAGE_BYTES * PAGE_BYTES)))
            self._slabs.append(slab)
            self.held_bytes += slab.nbytes
        else:
            return None
        begin = slab.take(size)
        self.lent_bytes += size
        tensor, exporter = slab.buffer.acquire(nbytes, begin)
        return tensor, exporter, slab, begin

    def take_back(self, slab: Slab, begin: int, nbytes: int) -> None:
        """Free a range of a slab."""
        slab.take_back(begin, nbytes)
        self.lent_bytes -= nbytes

    def give_up(self, nbytes: int) -> None:
        """Unmap idle slabs until so many bytes are free, as far as possible."""
        for slab in [slab for slab in self._slabs if slab.idle]:
            if nbytes <= 0:
                return
            self._slabs.remove(slab)
            self.held_bytes -= slab.nbytes
            nbytes -= slab.nbytes
            slab.buffer.release()
