"""Allocation of host buffers for tickets, within the budget if at all possible."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from offload_strategy.host_memory.idle_memory import IdleMemory
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.store.copy_engine import CopyEngines
from offload_strategy.store.ticket_registry import TicketRegistry
from offload_strategy.telemetry import Recorder

POLL_SECONDS = 0.001


class BufferAllocator:
    """Allocates buffers from the pool, if necessary by dropping prefetched copies.

    Args:
        pool: The pool.
        copies: Copies of devices, which keep buffers until they are over.
        registry: Knows which copies can be dropped, and whether writes will free buffers.
        recorder: Counts the time for which training waited for a buffer.
    """

    def __init__(
        self, pool: BufferPool, registry: TicketRegistry, copies: CopyEngines, recorder: Recorder
    ) -> None:
        self._copies = copies
        self._pool = pool
        self._idle = IdleMemory(pool)
        self._registry = registry
        self._recorder = recorder

    def try_allocate(self, nbytes: int, *, pinned: bool) -> torch.Tensor | None:
        """Return a buffer if the budget has room; drops no copies."""
        self._idle.look(acquires=True)
        return self._acquire(nbytes, pinned=pinned)

    def allocate_now(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return a buffer at once, within the budget if possible."""
        buffer = self._reclaimed(nbytes, pinned=pinned)
        return self._beyond(nbytes, pinned=pinned) if buffer is None else buffer

    def allocate_waiting(self, client: str, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """Return a buffer after waiting for writes, or copies of a device, to free some.

        If none is in flight, this would wait for ever, and exceeds the budget instead.
        """
        begin = time.perf_counter()
        while (buffer := self._reclaimed(nbytes, pinned=pinned)) is None:
            if pinned and self._copies.wait_for_oldest():
                continue
            if not self._registry.writing_bytes:
                break
            time.sleep(POLL_SECONDS)
        self._recorder.stalled(client, begin)
        return self._beyond(nbytes, pinned=pinned) if buffer is None else buffer

    def plan(self, classes: Mapping[int, int]) -> None:
        """See `BufferPool.plan`."""
        self._pool.plan(classes)

    def trim(self) -> None:
        """See `BufferPool.trim`."""
        self._pool.trim()

    def pass_begins(self) -> None:
        """See `TensorStore.pass_begins`."""
        self._idle.pass_begins()

    def idle_may_exceed(self, nbytes: int) -> None:
        """See `IdleMemory.may_exceed`."""
        self._idle.may_exceed(nbytes)

    def look(self) -> None:
        """See `IdleMemory.look`."""
        self._idle.look()

    def keep_idle_beyond(self, nbytes: int) -> None:
        """See `BufferPool.keep_idle_beyond`."""
        self._pool.keep_idle_beyond(nbytes)

    def keep_idle(self, nbytes: int) -> None:
        """See `BufferPool.keep_idle`."""
        self._pool.keep_idle(nbytes)

    def _reclaimed(self, nbytes: int, *, pinned: bool) -> torch.Tensor | None:
        self._idle.look(acquires=True)
        self._registry.release_written()
        while (buffer := self._acquire(nbytes, pinned=pinned)) is None:
            with self._registry.lock:
                if not self._registry.drop_copy():
                    return None
        return buffer

    def _beyond(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        buffer = self._acquire(nbytes, pinned=pinned, beyond_budget=True)
        assert buffer is not None
        return buffer

    def _acquire(
        self, nbytes: int, *, pinned: bool, beyond_budget: bool = False
    ) -> torch.Tensor | None:
        buffer = self._pool.acquire(nbytes, pinned=pinned, beyond_budget=beyond_budget)
        if buffer is not None:
            self._idle.acquired(nbytes)
        return buffer
