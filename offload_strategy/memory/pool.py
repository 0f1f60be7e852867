"""The pool: buffers recycled per size class, under one budget, with honest figures."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass

import torch

from offload_strategy.memory.buffers import HostBuffer
from offload_strategy.units import PAGE_BYTES, MiB, round_up

#: Idle buffers kept for the next request at most, whatever the budget: a fresh mapping costs its
#: page faults again (13 % of step time in a trial without recycling), idle memory costs memory.
IDLE_BYTES = 256 * MiB


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Host buffers in figures.

    Args:
        held_bytes: mapped now, lent or idle.
        peak_bytes: the most that was ever mapped.
        lent_bytes: mapped and in use, rounded up to pages.
        requested_bytes: what the users of the lent buffers asked for.
    """

    held_bytes: int
    peak_bytes: int
    lent_bytes: int
    requested_bytes: int

    @property
    def fragmentation(self) -> float:
        """Share of the bytes in use that nobody asked for, 0 to 1."""
        return 1.0 - self.requested_bytes / self.lent_bytes if self.lent_bytes else 0.0


class BufferPool:
    """Lends flat uint8 tensors over page-aligned host memory.

    Args:
        budget: bytes that may be mapped at once.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._lock = threading.Lock()
        # (Size class, pinned) -> idle buffers; the class unused for longest is trimmed first.
        self._idle: OrderedDict[tuple[int, bool], list[HostBuffer]] = OrderedDict()
        # Finalizers only append here, which needs no lock: they may run inside a collection that
        # started while this very thread held the lock.
        self._returned: deque[tuple[HostBuffer, int]] = deque()
        self._held = self._idle_bytes = self._lent = self._requested = self._peak = 0
        self._closed = False

    def lend(
        self, nbytes: int, *, pinned: bool = False, beyond_budget: bool = False
    ) -> torch.Tensor | None:
        """A flat uint8 host tensor of `nbytes`, or None when the budget is used up.

        Its memory returns to the pool when the last alias of the tensor is gone. The contents are
        undefined.

        Args:
            nbytes: bytes wanted.
            pinned: registered with CUDA, for asynchronous copies to and from a device.
            beyond_budget: map more memory even so. For what a running computation cannot go on
                without: waiting there would be for ever.
        """
        size = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        with self._lock:
            self._collect()
            idle = self._idle.get((size, pinned))
            if idle:
                buffer = idle.pop()
                self._idle.move_to_end((size, pinned))
                self._idle_bytes -= size
            else:
                self._trim(self.budget - size)
                if self._held + size > self.budget and not beyond_budget:
                    return None
                buffer = HostBuffer(size, pinned=pinned)
                self._held += size
                self._peak = max(self._peak, self._held)
            self._lent += size
            self._requested += nbytes

        def give_back(buffer: HostBuffer, nbytes: int = nbytes) -> None:
            self._returned.append((buffer, nbytes))
            if self._closed and self._lock.acquire(blocking=False):
                # Nobody will ask for another buffer, and so collect this one.
                try:
                    self._collect()
                finally:
                    self._lock.release()

        return buffer.lend(nbytes, give_back)

    def usage(self) -> MemoryUsage:
        """Figures of this moment."""
        with self._lock:
            self._collect()
            return MemoryUsage(self._held, self._peak, self._lent, self._requested)

    def close(self) -> None:
        """Unmap what is idle; what is still lent is unmapped when it comes back."""
        with self._lock:
            self._closed = True
            self._collect()
            self._trim(0, idle_at_most=0)

    def _collect(self) -> None:
        while self._returned:
            buffer, nbytes = self._returned.popleft()
            self._lent -= buffer.nbytes
            self._requested -= nbytes
            self._idle.setdefault((buffer.nbytes, buffer.pinned), []).append(buffer)
            self._idle_bytes += buffer.nbytes
        self._trim(self.budget, idle_at_most=0 if self._closed else IDLE_BYTES)

    def _trim(self, held_at_most: int, idle_at_most: int = IDLE_BYTES) -> None:
        """Unmap idle buffers, the class unused for longest first, until both limits hold."""
        while self._idle_bytes and (self._held > held_at_most or self._idle_bytes > idle_at_most):
            key, buffers = next(iter(self._idle.items()))
            if not buffers:
                del self._idle[key]
                continue
            buffer = buffers.pop()
            buffer.release()
            self._held -= buffer.nbytes
            self._idle_bytes -= buffer.nbytes
