"""The load of the tiers: bytes in flight, rates, and waits for them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.telemetry import Direction


class TierLoad:
    """The load of the tiers of activations.

    Args:
        store: The store that moves the bytes.
        tiers: Tiers of activations, in order.
        client: The client for which waits are counted in metrics.
    """

    def __init__(self, store: TensorStore, tiers: Sequence[Tier], client: str) -> None:
        self._store = store
        self._host = [tier for tier in tiers if tier.is_host_memory]
        self._queues = [queue for tier in tiers for queue in tier.queues]
        self._client = client
        #: Whether an accelerator computes: its memory is free when a copy to the host is over.
        self.on_device = False

    def writing_bytes(self) -> int:
        """Return the bytes that wait to be written or are being written."""
        return self._store.writing_bytes

    def own_writing_bytes(self) -> int:
        """Return those of activations."""
        return self._store.writing_bytes_of(self._client)

    def leaving_bytes(self) -> int:
        """Return the bytes of activations in the computing device's memory that are leaving it."""
        return self._store.copies.source_bytes() if self.on_device else self.own_writing_bytes()

    def release_at_least(self, nbytes: int, seconds: float) -> None:
        """Free so many of the bytes that leave the computing device, within so many seconds."""
        at_most = max(0, self.leaving_bytes() - nbytes)
        if self.on_device:
            self._store.copies.release_sources(at_most)
        elif self.own_writing_bytes() > at_most:
            self.await_own_writing_at_most(at_most, seconds)

    def release_written(self) -> None:
        """Free the memory of what was written."""
        self._store.release_written()

    def stalled_seconds(self) -> float:
        """Return the seconds for which the store made training wait for the tiers."""
        return self._store.recorder.stall_seconds(self._client)

    def keep_idle(self, nbytes: int) -> None:
        """Keep at most so many bytes of idle buffers from now on."""
        self._store.pool.keep_idle(nbytes)

    def rate(self, *, write: bool) -> float | None:
        """Return the bytes per second of all paths together, or None if unknown."""
        direction = Direction.WRITE if write else Direction.READ
        known = [rate for queue in self._queues if (rate := queue.bandwidth.rate(direction))]
        return sum(known) * len(self._queues) / len(known) if known else None

    def has_room_in_memory(self, nbytes: int) -> bool:
        """Return whether a host tier has room for so many bytes."""
        return any(tier.has_room(nbytes) for tier in self._host)

    def await_writing_at_most(self, nbytes: int, seconds: float) -> float:
        """Wait until at most so many bytes are to be written, or so long; return the seconds."""
        begin = time.perf_counter()
        self._store.await_writes(self._client, nbytes, seconds)
        return time.perf_counter() - begin

    def await_own_writing_at_most(self, nbytes: int, seconds: float) -> float:
        """Do the same for bytes of activations only."""
        begin = time.perf_counter()
        self._store.await_writes(self._client, nbytes, seconds, own=True)
        return time.perf_counter() - begin
