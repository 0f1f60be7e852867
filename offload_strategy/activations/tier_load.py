"""What the automatic budget knows of the tiers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from offload_strategy.store.tensor_store import TensorStore
from offload_strategy.store.ticket import Tier
from offload_strategy.telemetry import Direction


class TierTraffic:
    """The traffic on the tiers of activations.

    Args:
        store: moves the bytes.
        tiers: where they may go, in order.
        client: for whom to wait, for metrics.
    """

    def __init__(self, store: TensorStore, tiers: Sequence[Tier], client: str) -> None:
        self._store = store
        self._host = [tier for tier in tiers if tier.is_host_memory]
        self._queues = [queue for tier in tiers for queue in tier.queues]
        self._client = client

    def writing_bytes(self) -> int:
        """Bytes that wait to be written, or are being written."""
        return self._store.writing_bytes

    def own_writing_bytes(self) -> int:
        """Those of activations."""
        return self._store.writing_bytes_of(self._client)

    def let_go(self) -> None:
        """Give up the memory of what was written."""
        self._store.let_go()

    def stalled_seconds(self) -> float:
        """For which training has waited for the tiers, as far as the store made it wait."""
        return self._store.stalled_seconds(self._client)

    def keep_idle(self, nbytes: int) -> None:
        """Give idle buffers back beyond so many bytes, from now on."""
        self._store.keep_idle(nbytes)

    def rate(self, *, write: bool) -> float | None:
        """Bytes per second of all paths together, or None while nothing is known of them."""
        direction = Direction.WRITE if write else Direction.READ
        known = [rate for queue in self._queues if (rate := queue.bandwidth.rate(direction))]
        return sum(known) * len(self._queues) / len(known) if known else None

    def has_room_in_memory(self, nbytes: int) -> bool:
        """Whether a host tier takes so much without writing anything."""
        return any(tier.has_room(nbytes) for tier in self._host)

    def await_writing_at_most(self, nbytes: int, seconds: float) -> float:
        """Wait until no more than that is to be written, or so long; the seconds it took."""
        begin = time.perf_counter()
        self._store.await_writes(self._client, nbytes, seconds)
        return time.perf_counter() - begin

    def await_own_writing_at_most(self, nbytes: int, seconds: float) -> float:
        """The same, of activations."""
        begin = time.perf_counter()
        self._store.await_writes(self._client, nbytes, seconds, own=True)
        return time.perf_counter() - begin
