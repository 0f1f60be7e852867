"""A pool of host buffers under one budget."""

from __future__ import annotations

import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from offload_strategy.host_memory.arena import Arena, PinnedSlabs, create_arena
from offload_strategy.host_memory.buffers import HostBuffer, Lent
from offload_strategy.host_memory.idle_memory import IdleLimit
from offload_strategy.units import PAGE_BYTES, MiB, round_up

#: Default limit for idle buffers: a new mapping has page faults again (13 % of step time in a trial
#: without recycling), but idle buffers take memory.
IDLE_BYTES = 256 * MiB
#: Share of what the process needs that may be idle, if that is more. What the process needs while
#: nobody measures it, as an evaluation may, comes on top of idle memory, so this is not all of it.
IDLE_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class MemoryUsage:
    """Bytes of a pool: mapped, mapped at most so far, in use (whole pages), and as requested."""

    held_bytes: int
    peak_bytes: int
    lent_bytes: int
    requested_bytes: int

    @property
    def fragmentation(self) -> float:
        """Share of the bytes in use that was not requested, 0 to 1."""
        return 1.0 - self.requested_bytes / self.lent_bytes if self.lent_bytes else 0.0


class BufferPool:
    """Allocates flat uint8 tensors over page-aligned host memory, `budget` bytes at a time.

    They are ranges of an arena, pinned ones of slabs. What the arena has no room for, because its
    gaps are small or the budget is exceeded, is mapped for one loan.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._process_limit: Callable[[], int] = lambda: sys.maxsize
        self._lock = threading.Lock()
        # See [Note: no Python code in finalizers]. A buffer in use is known by its weak
        # reference, which must exist to be notified.
        self._returned: deque[weakref.ref[Any]] = deque()
        # Each with the bytes lent, the bytes requested, and what takes the memory back.
        self._loans: dict[int, tuple[weakref.ref[Any], int, int, Callable[[], None]]] = {}
        # Bytes of separate mappings, and of all buffers in use.
        self._apart = self._lent = self._requested = self._peak = 0
        self._slabs = PinnedSlabs(budget)
        self._arena = create_arena(budget)
        # Limit of `keep_idle`; without it the default, and the bytes in addition to it.
        self._scarce: int | None = None
        self._beyond = 0
        self._limit = IdleLimit()
        self.device_may_wait = True  # whether tensors may wait for `step()` on their device

    # ------------------------------------------------------------------ limits of idle memory
    def keep_idle(self, nbytes: int) -> None:
        """Keep at most so many bytes of idle buffers from now on, because memory is scarce."""
        with self._lock:
            self._scarce = nbytes
            self._collect()

    def keep_idle_beyond(self, nbytes: int) -> None:
        """Keep more idle buffers for a client that returns `nbytes` at once and asks again."""
        with self._lock:
            self._beyond = max(self._beyond, nbytes)

    def idle_may_exceed(self, nbytes: int) -> None:
        """Let idle buffers add so many bytes, for clients that use the same ones in turn."""
        with self._lock:
            self._limit.may_exceed = max(self._limit.may_exceed, nbytes)

    def limit_process(self, nbytes: Callable[[], int], *, is_scarce: bool) -> None:
        """Let what `may_wait` take as much as `nbytes` returns at the begin of a pass, and now.

        If memory is scarce, all of it, and idle buffers as well; else little more than is needed.
        """
        self._process_limit, self._limit.process_bytes = nbytes, nbytes()
        self._limit.is_scarce |= is_scarce

    def pass_begins(self) -> None:
        """Unmap idle memory that would raise the peak of a forward pass, which starts now."""
        process_bytes = self._process_limit()
        with self._lock:
            self._limit.process_bytes = process_bytes
            self._limit.pass_begins()
            self._look()

    def look(self) -> None:
        """Unmap idle memory if it would raise the peak; see [Note: idle memory and peaks]."""
        with self._lock:
            self._look()

    def trim(self, keep: int = 0) -> None:
        """Unmap idle memory but for `keep` bytes and pinned slabs."""
        with self._lock:
            self._collect()
            self._trim(self.budget, keep)

    # ------------------------------------------------------------------ buffers
    def acquire(
        self, nbytes: int, *, pinned: bool = False, beyond_budget: bool = False
    ) -> torch.Tensor | None:
        """Return a flat uint8 host tensor of `nbytes`, or None if the budget is used up.

        Its memory returns to the pool when the last alias of the tensor is freed. The contents are
        undefined. Copies between `pinned` memory and a device are asynchronous. `beyond_budget` is
        for a computation that would otherwise wait for ever.
        """
        size = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        with self._lock:
            if not pinned:  # pinned memory stays
                self._look(acquires=True)
            if self._returned:
                self._collect()
            lent: Lent | None = None
            if pinned:
                lent = self._lend_part(self._slabs, nbytes, size, beyond_budget=beyond_budget)
            elif self._arena is not None:
                lent = self._lend_part(self._arena, nbytes, size)
            if lent is None and not pinned:
                lent = self._lend_mapping(nbytes, size, beyond_budget=beyond_budget)
            if lent is None:
                return None
            self._peak = max(self._peak, self._held)
            self._lent += lent.nbytes
            self._requested += nbytes
            loan = weakref.ref(lent.exporter, self._returned.append)
            self._loans[id(loan)] = (loan, lent.nbytes, nbytes, lent.take_back)
            self._limit.acquired(nbytes)
            return lent.tensor

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is of the arena, as that of buffers usually is."""
        arena = self._arena  # `close` may drop it meanwhile
        return arena is not None and tensor.data_ptr() in arena.addresses

    def may_wait(self, nbytes: int) -> bool:
        """Whether what may wait elsewhere can stay in memory; see [Note: idle memory and peaks]."""
        with self._lock:
            self._collect()
            return self._limit.has_room(nbytes)

    def count_waiting(self, tensor: torch.Tensor) -> torch.Tensor:
        """Count a tensor outside of the budget that stays in memory because it `may_wait`."""
        with self._lock:
            loan = weakref.ref(tensor, self._returned.append)
            self._loans[id(loan)] = (loan, 0, 0, partial(self._count, -tensor.nbytes))
            self._count(tensor.nbytes)
            return tensor

    @property
    def waiting_bytes(self) -> int:
        """Bytes of tensors that stay in memory because they `may_wait`."""
        with self._lock:
            self._collect()
            return self._limit.waiting

    def _count(self, waiting: int) -> None:
        self._limit.waiting += waiting

    def usage(self) -> MemoryUsage:
        """Return the current memory of the pool."""
        with self._lock:
            self._collect()
            return MemoryUsage(self._held, self._peak, self._lent, self._requested)

    def close(self) -> None:
        """Unmap idle buffers; buffers in use are unmapped when their tensors are freed."""
        with self._lock:
            self._collect()
            self._trim(0, 0)
            self._slabs = PinnedSlabs(self.budget)
            # From now on only the tensors own their memory.
            self._loans.clear()
            self._limit.waiting = 0
            self._arena = None
            self._apart = self._lent = self._requested = 0

    @property
    def _idle_at_most(self) -> int:
        if self._scarce is not None:
            return self._scarce
        return max(IDLE_BYTES, int(IDLE_SHARE * self._limit.needed_bytes)) + self._beyond

    @property
    def _held(self) -> int:
        in_arena = 0 if self._arena is None else self._arena.held_bytes
        return self._apart + self._slabs.held_bytes + in_arena

    def _look(self, *, acquires: bool = False) -> None:
        excess = self._limit.excess(self._idle_bytes, acquires=acquires)
        if excess and (idle := self._idle_bytes()):
            self._trim(self.budget, idle - excess)

    def _idle_bytes(self) -> int:
        """Return the bytes of idle memory that `trim` can unmap."""
        self._collect()
        return 0 if self._arena is None else self._arena.idle_bytes()

    def _lend_part(
        self, parts: Arena | PinnedSlabs, nbytes: int, size: int, *, beyond_budget: bool = False
    ) -> Lent | None:
        """Return a part of what is there; idle memory goes where the budget is short."""
        lent = parts.acquire(nbytes, size, self.budget - self._held)
        if lent is None:
            self._trim(self.budget - size, self._idle_at_most)
            lent = parts.acquire(nbytes, size, size if beyond_budget else self.budget - self._held)
        return lent

    def _lend_mapping(self, nbytes: int, size: int, *, beyond_budget: bool) -> Lent | None:
        """Return memory that is mapped for this loan alone."""
        self._trim(self.budget - size, self._idle_at_most)
        if self._held + size > self.budget and not beyond_budget:
            return None
        buffer = HostBuffer(size)
        self._apart += size
        return Lent(*buffer.acquire(nbytes), size, partial(self._unmap, buffer))

    def _unmap(self, buffer: HostBuffer) -> None:
        self._apart -= buffer.nbytes
        buffer.release()

    def _collect(self) -> None:
        while self._returned:
            loan = self._loans.pop(id(self._returned.popleft()), None)
            if loan is None:
                continue  # acquired before `close`
            _, size, nbytes, take_back = loan
            self._lent -= size
            self._requested -= nbytes
            take_back()
        self._trim(self.budget, self._idle_at_most)

    def _trim(self, held_at_most: int, idle_at_most: int) -> None:
        """Unmap idle memory until both limits hold: that of the arena, then slabs."""
        idle = self._held - self._lent - self._slabs.idle_bytes()
        if self._held > held_at_most or idle > idle_at_most:
            if self._arena is not None:
                idle = self._arena.idle_bytes()
                self._arena.give_up(max(self._held - held_at_most, idle - idle_at_most))
            self._slabs.give_up(self._held - held_at_most)
