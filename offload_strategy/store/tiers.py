"""Tiers: where tickets may be, fastest first."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from offload_strategy.io.queues.moves import Stripe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.store.striping import STRIPE_UNIT, deal

if TYPE_CHECKING:
    from offload_strategy.store.ticket import Entry


#: So many residents are noted before those that left are looked for.
_SWEPT_AT = 256


class HostTier:
    """Host memory: a ticket here stays where it is (or in a host buffer, when it was on a device).

    Args:
        name: from the config.
        capacity: bytes that tickets may hold here.
    """

    def __init__(self, name: str, capacity: int) -> None:
        self.name = name
        self.capacity = capacity
        self.used_bytes = 0
        # (-next use, sequence, entry): what is needed last comes first. Entries that left, or are
        # expected at another time by now, are recognised when they come up.
        self._residents: list[tuple[float, int, Entry]] = []
        self._sequence = itertools.count()
        self._swept_at = _SWEPT_AT

    def has_room(self, nbytes: int) -> bool:
        """Whether `nbytes` more would fit."""
        return self.used_bytes + nbytes <= self.capacity

    def claim(self, nbytes: int) -> bool:
        """Take `nbytes` of the capacity, if they are there."""
        if not self.has_room(nbytes):
            return False
        self.used_bytes += nbytes
        return True

    def overdraw(self, nbytes: int) -> None:
        """Take `nbytes` although they may not be there: what has them will be released soon."""
        self.used_bytes += nbytes

    def release(self, nbytes: int) -> None:
        """Give `nbytes` of the capacity back."""
        self.used_bytes -= nbytes

    def note(self, entry: Entry) -> None:
        """Remember an entry that may be evicted; again when its next use changed."""
        if entry.next_use is None:
            return
        if len(self._residents) >= self._swept_at:
            # Where nobody ever has to make room, nothing that left would come up.
            self._residents = [item for item in self._residents if self._is_current(item)]
            heapq.heapify(self._residents)
            self._swept_at = max(_SWEPT_AT, 2 * len(self._residents))
        heapq.heappush(self._residents, (-entry.next_use, next(self._sequence), entry))

    def _is_current(self, item: tuple[float, int, Entry]) -> bool:
        entry = item[2]
        return entry.tier is self and entry.may_leave and entry.next_use == -item[0]

    def victims(self, nbytes: int, next_use: float) -> list[Entry]:
        """Entries that are needed after `next_use` and whose going makes room for `nbytes`.

        Returns:
            The entries, needed last first; an empty list if that is not enough to make room.
        """
        chosen: list[tuple[float, int, Entry]] = []
        missing = self.used_bytes + nbytes - self.capacity
        while missing > 0 and self._residents and -self._residents[0][0] > next_use:
            item = heapq.heappop(self._residents)
            entry = item[2]
            # It was told the same time twice: then it is here twice.
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
    """One capacity over the several paths of a tier, in bytes."""

    capacity: int
    used_bytes: int = 0


class PathTier:
    """One path, or several that work as one (MLP-Offload's virtual tier).

    Tickets are dealt to the paths in proportion to their bandwidth; large ones are striped.

    Args:
        name: for messages.
        queues: of the paths; other tiers may use them too.
        quotas: for the queues whose paths share a capacity.
    """

    def __init__(
        self, name: str, queues: Sequence[PathQueue], quotas: dict[PathQueue, Quota] | None = None
    ) -> None:
        self.name = name
        self.queues = tuple(queues)
        self._quotas = quotas or {}
        self._live = dict.fromkeys(self.queues, 0)
        self._lock = threading.Lock()

    @property
    def regions(self) -> list[Region]:
        """Of its paths."""
        return [queue.region for queue in self.queues if isinstance(queue.region, Region)]

    @property
    def capacity(self) -> int:
        """Bytes at most, whoever uses them."""
        own = [self._quotas[queue] for queue in self.queues if queue in self._quotas]
        shared = {id(quota): quota.capacity for quota in own}
        single = [q.region for q in self.queues if q not in self._quotas]
        return sum(shared.values()) + sum(s.capacity for s in single if isinstance(s, Region))

    @property
    def used_bytes(self) -> int:
        """Bytes in extents on its paths, whoever uses them."""
        return sum(region.used_bytes for region in self.regions)

    @property
    def device_memory(self) -> bool:
        """Whether all paths read and write device memory themselves."""
        return all(queue.backend.device_memory for queue in self.queues)

    @property
    def checks(self) -> bool:
        """Whether a path keeps checksums."""
        return any(queue.checksum is not None for queue in self.queues)

    def claim(self, nbytes: int) -> list[Stripe] | None:
        """Extents for `nbytes`, or None when the paths are full."""
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
                # The odd part comes last, so that all begin where direct I/O can take them.
                dealt = list(zip(open_queues, parts, strict=True))
                for queue, part in sorted(dealt, key=lambda pair: pair[1] % STRIPE_UNIT):
                    try:
                        stripe = self._claim_on(queue, begin, part) if part else None
                    except BaseException:  # a path failed while its file was to grow
                        self._free(stripes)
                        raise
                    if stripe is not None:
                        stripes.append(stripe)
                        begin += part
                    elif part:
                        open_queues.remove(queue)
            return stripes

    def release(self, stripes: Sequence[Stripe]) -> None:
        """Give extents back."""
        with self._lock:
            self._free(stripes)

    def shares(self) -> dict[str, float]:
        """Which share of new bytes each path would get of an empty tier, 0 to 1."""
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
    """Bandwidth of each path; one of which nothing is known counts as the average of the others."""
    rates = [queue.bandwidth.round_trip() for queue in queues]
    known = [rate for rate in rates if rate]
    usual = sum(known) / len(known) if known else 1.0
    return [rate or usual for rate in rates]


Tier = HostTier | PathTier
