"""Pinned memory in slabs: registered with the device once, and cut into ranges.

To register memory takes long and may wait for the device, so it must not happen in every step. A
slab stays registered until the budget needs its memory for something else.
"""

from __future__ import annotations

from typing import Any

import torch

from offload_strategy.host_memory.arena import FreeRanges
from offload_strategy.host_memory.buffers import HostBuffer
from offload_strategy.units import PAGE_BYTES, MiB, round_up

#: Bytes of a slab: a share of the budget within these bounds, or one larger request.
_SHARE = 16
_LEAST_BYTES, _MOST_BYTES = 1 * MiB, 256 * MiB


class Slab:
    """One registered stretch of memory and its free ranges."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = HostBuffer(nbytes, pinned=True)
        self.nbytes = self.buffer.nbytes
        self.free = FreeRanges(self.nbytes)

    @property
    def idle(self) -> bool:
        """Whether nothing of the slab is in use."""
        return list(self.free) == [(0, self.nbytes)]


class PinnedSlabs:
    """All slabs of a pool, of which `budget` bytes may be mapped; the caller holds a lock."""

    def __init__(self, budget: int) -> None:
        size = min(_MOST_BYTES, max(_LEAST_BYTES, budget // _SHARE))
        self._slab_bytes = round_up(size, PAGE_BYTES)
        self._slabs: list[Slab] = []
        self.held_bytes = 0
        self.lent_bytes = 0

    def acquire(self, nbytes: int, room: int) -> tuple[torch.Tensor, Any, Slab, int] | None:
        """Return a tensor, the exporter that dies with its storage, and where its range is.

        The smallest free range that fits is taken; without one, a slab is registered if
        `held_bytes` may grow by its `room` bytes. Otherwise None.
        """
        size = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        fitting = (
            (end - begin, number, begin)
            for number, slab in enumerate(self._slabs)
            for begin, end in slab.free
            if end - begin >= size
        )
        best = min(fitting, default=None)
        if best is not None:
            slab, begin = self._slabs[best[1]], best[2]
        elif size <= room:
            slab = Slab(max(size, min(self._slab_bytes, room // PAGE_BYTES * PAGE_BYTES)))
            self._slabs.append(slab)
            self.held_bytes += slab.nbytes
            begin = 0
        else:
            return None
        slab.free.take(begin, size)
        self.lent_bytes += size
        tensor, exporter = slab.buffer.acquire(nbytes, begin)
        return tensor, exporter, slab, begin

    def take_back(self, slab: Slab, begin: int, nbytes: int) -> None:
        """Free a range of a slab."""
        slab.free.take_back(begin, nbytes)
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
