"""Host buffers for tickets: within the budget while there is any way to."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from offload_strategy.host_memory.idle_memory import IdleMemory
from offload_strategy.host_memory.pool import BufferPool
from offload_strategy.store.ticket_registry import TicketRegistry
from offload_strategy.telemetry import Recorder

POLL_SECONDS = 0.001


class BufferAllocator:
    """Gets buffers from the pool, at the price of copies that were loaded for later.

    Args:
        pool: lends them.
        ledger: knows which copies can be dropped, and whether writes will give buffers back.
        recorder: counts the time in which training waited for a buffer.
    """

    def __init__(self, pool: BufferPool, registry: TicketRegistry, recorder: Recorder) -> None:
        self._pool = pool
        self._idle = IdleMemory(pool)
        self._registry = registry
        self._recorder = recorder

    def try_allocate(self, nbytes: int, *, pinned: bool) -> torch.Tensor | None:
        """A buffer if the budget has room; takes nothing from anybody."""
        self._idle.look(acquires=True)
        return self._acquire(nbytes, pinned=pinned)

    def allocate_now(self, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """A buffer at once: of the budget if possible, else beyond it."""
        buffer = self._reclaimed(nbytes, pinned=pinned)
        return self._beyond(nbytes, pinned=pinned) if buffer is None else buffer

    def allocate_waiting(self, client: str, nbytes: int, *, pinned: bool) -> torch.Tensor:
        """A buffer, after waiting for writes to give some back.

        When none is under way, waiting would be for ever, and the buffer goes beyond the budget.
        """
        begin = time.perf_counter()
        while (buffer := self._reclaimed(nbytes, pinned=pinned)) is None:
            if not self._registry.writing_bytes:
                break
            time.sleep(POLL_SECONDS)
        self._recorder.stalled(client, begin)
        return self._beyond(nbytes, pinned=pinned) if buffer is None else buffer

    def plan(self, classes: Mapping[int, int]) -> None:
        """Keep so many buffers of these sizes; see `BufferPool.plan`."""
        self._pool.plan(classes)

    def trim(self) -> None:
        """Give idle buffers back, for a while in which none will be asked for."""
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
