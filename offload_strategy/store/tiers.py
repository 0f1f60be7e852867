"""The two kinds of tiers: host memory, and one path or several."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from offload_strategy.io.queues.moves import Stripe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.store.striping import STRIPE_UNIT, deal
from offload_strategy.store.ticket import Entry, Tier

#: Number of entries in the heap above which outdated ones are removed.
_SWEPT_AT = 256


class HostTier(Tier):
    """Host memory: a host tensor stays where it is, a device tensor is copied to a host buffer.

    Args:
        name: name from the config.
        capacity: maximum bytes of tickets.
    """

    is_host_memory = True
    capacity: int = 0
    used_bytes: int = 0

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(name)
        self.capacity = capacity
        # Heap of (-next use, sequence, entry), latest use first. Entries that were evicted or have
        # another next use by now are skipped when they come up.
        self._residents: list[tuple[float, int, Entry]] = []
        self._sequence = itertools.count()
        self._swept_at = _SWEPT_AT

    def has_room(self, nbytes: int) -> bool:
        """Whether there is room for `nbytes` more."""
        return self.used_bytes + nbytes <= self.capacity

    def claim(self, nbytes: int) -> bool:
        """Reserve `nbytes`; return False if there is no room."""
        if not self.has_room(nbytes):
            return False
        self.used_bytes += nbytes
        return True

    def claim_over_capacity(self, nbytes: int) -> None:
        """Reserve `nbytes` even without room: the entry that they replace is released soon."""
        self.used_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Release `nbytes`."""
        self.used_bytes -= nbytes

    def note(self, entry: Entry) -> None:
        """Record an entry that may be evicted, or its changed next use."""
        if entry.next_use is None:
            return
        if len(self._residents) >= self._swept_at:
            # Without evictions outdated entries would never come up.
            self._residents = [item for item in self._residents if self._is_current(item)]
            heapq.heapify(self._residents)
            self._swept_at = max(_SWEPT_AT, 2 * len(self._residents))
        heapq.heappush(self._residents, (-entry.next_use, next(self._sequence), entry))

    def _is_current(self, item: tuple[float, int, Entry]) -> bool:
        entry = item[2]
        return entry.tier is self and entry.may_leave and entry.next_use == -item[0]

    def victims(self, nbytes: int, next_use: float) -> list[Entry]:
        """Return entries needed after `next_use` whose eviction makes room for `nbytes`.

        Returns:
            The entries, latest use first; an empty list if they do not make enough room.
        """
        chosen: list[tuple[float, int, Entry]] = []
        missing = self.used_bytes + nbytes - self.capacity
        while missing > 0 and self._residents and -self._residents[0][0] > next_use:
            item = heapq.heappop(self._residents)
            entry = item[2]
            # An entry that was recorded twice with the same next use is in the heap twice.
            if self._is_current(item) and not any(entry is other for _, _, other in chosen):
                chosen.append(item)
                missing -= entry.nbytes
        if missing > 0:
            for item in chosen:
                heapq.heappush(self._residents, item)
            return []
        return [entry for _, _, entry in chosen]


@dataclass(eq=False)
class Quota:
    """A capacity in bytes that several paths of a tier share."""

    capacity: int
    used_bytes: int = 0


class PathTier(Tier):
    """One path, or several that work as one (MLP-Offload's virtual tier).

    Tickets are distributed over the paths in proportion to bandwidth; large ones are striped.

    Args:
        name: name for messages.
        queues: queues of the paths, which other tiers may use too.
        quotas: quotas of the queues whose paths share a capacity.
    """

    is_host_memory = False

    def __init__(
        self, name: str, queues: Sequence[PathQueue], quotas: dict[PathQueue, Quota] | None = None
    ) -> None:
        super().__init__(name)
        self.queues = tuple(queues)
        self._quotas = quotas or {}
        self._live = dict.fromkeys(self.queues, 0)
        self._lock = threading.Lock()

    @property
    def regions(self) -> list[Region]:
        """The regions of its paths."""
        return [queue.region for queue in self.queues if isinstance(queue.region, Region)]

    @property
    def capacity(self) -> int:
        """Maximum bytes, shared with other users of the paths."""
        own = [self._quotas[queue] for queue in self.queues if queue in self._quotas]
        shared = {id(quota): quota.capacity for quota in own}
        single = [q.region for q in self.queues if q not in self._quotas]
        return sum(shared.values()) + sum(s.capacity for s in single if isinstance(s, Region))

    @property
    def used_bytes(self) -> int:
        """Bytes in extents on its paths, by any user."""
        return sum(region.used_bytes for region in self.regions)

    @property
    def device_memory(self) -> bool:
        """Whether all paths transfer directly from and to device memory.

        A checksum is computed by the host, which cannot read device memory.
        """
        return not self.checks and all(queue.backend.device_memory for queue in self.queues)

    @property
    def checks(self) -> bool:
        """Whether a path keeps checksums."""
        return any(queue.checksum is not None for queue in self.queues)

    def claim_extents(self, nbytes: int) -> list[Stripe] | None:
        """Reserve extents for `nbytes`; None if the paths are full."""
        with self._lock:
            if len(self.queues) == 1:
                stripe = self._claim_on(self.queues[0], 0, nbytes)
                return None if stripe is None else [stripe]
            stripes: list[Stripe] = []
            open_queues = list(self.queues)
            begin = 0
            while begin < nbytes:
                if not open_queues:
                    self._free(stripes)
                    return None
                parts = deal(
                    nbytes - begin,
                    [self._live[queue] for queue in open_queues],
                    _weights(open_queues),
                )
                # A part with an odd size comes last, so that all parts begin page-aligned.
                dealt = list(zip(open_queues, parts, strict=True))
                for queue, part in sorted(dealt, key=lambda pair: pair[1] % STRIPE_UNIT):
                    try:
                        stripe = self._claim_on(queue, begin, part) if part else None
                    except BaseException:  # a path failed while its file grew
                        self._free(stripes)
                        raise
                    if stripe is not None:
                        stripes.append(stripe)
                        begin += part
                    elif part:
                        open_queues.remove(queue)
            return stripes

    def release_extents(self, stripes: Sequence[Stripe]) -> None:
        """Release extents."""
        with self._lock:
            self._free(stripes)

    def shares(self) -> dict[str, float]:
        """Return the share of new bytes that each path of an empty tier receives, 0 to 1."""
        weights = _weights(self.queues)
        return {
            str(queue.path): weight / sum(weights)
            for queue, weight in zip(self.queues, weights, strict=True)
        }

    def _claim_on(self, queue: PathQueue, begin: int, nbytes: int) -> Stripe | None:
        quota = self._quotas.get(queue)
        if quota is not None and quota.used_bytes + nbytes > quota.capacity:
            return None
        assert isinstance(queue.region, Region)
        extent = queue.region.allocate(nbytes)
        if extent is None:
            return None
        if quota is not None:
            quota.used_bytes += extent.nbytes
        self._live[queue] += nbytes
        digests = None
        if queue.checksum is not None:
            digests = [0] * ceil(nbytes / queue.backend.block_size)
        return Stripe(queue, extent, begin, nbytes, digests)

    def _free(self, stripes: Sequence[Stripe]) -> None:
        for stripe in stripes:
            stripe.queue.region.free(stripe.extent)
            self._live[stripe.queue] -= stripe.nbytes
            if (quota := self._quotas.get(stripe.queue)) is not None:
                quota.used_bytes -= stripe.extent.nbytes


def _weights(queues: Sequence[PathQueue]) -> list[float]:
    """Return the bandwidth of each path; unknown ones count as the average of the others."""
    rates = [queue.bandwidth.round_trip() for queue in queues]
    known = [rate for rate in rates if rate]
    usual = sum(known) / len(known) if known else 1.0
    return [rate or usual for rate in rates]
