"""The kinds of tiers: memory of the device or the host, and paths that share a ticket's bytes."""

from __future__ import annotations

import threading
from bisect import bisect_left, insort
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field

from offload_strategy.io.queues.moves import Stripe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.store.ticket import Entry, Tier
from offload_strategy.units import MiB

#: Smaller tickets go to one path as a whole: two requests would cost more than they share.
STRIPE_BYTES = 8 * MiB
#: Parts of a striped ticket are multiples of this, except for the last.
STRIPE_UNIT = 1 * MiB


class MemoryTier(Tier):
    """Memory for `capacity` bytes of tickets; the caller holds the store's lock."""

    used_bytes: int = 0

    def __init__(self, name: str, capacity: int) -> None:
        super().__init__(name, capacity)
        # What may be evicted, in the order of its next use.
        self._residents: list[Entry] = []

    def has_room(self, nbytes: int) -> bool:
        """Whether there is room for `nbytes` more."""
        return self.used_bytes + nbytes <= self.capacity

    def claim(self, nbytes: int, *, over_capacity: bool = False) -> bool:
        """Reserve `nbytes`; return False if there is no room, unless it may be `over_capacity`."""
        if not over_capacity and not self.has_room(nbytes):
            return False
        self.used_bytes += nbytes
        return True

    def release(self, entry: Entry) -> None:
        """Release an entry's bytes."""
        self.used_bytes -= entry.nbytes
        if entry.next_use is not None:
            begin = bisect_left(self._residents, entry.next_use, key=_next_use)
            with suppress(ValueError):  # it was not noted yet
                del self._residents[self._residents.index(entry, begin)]

    def note(self, entry: Entry) -> None:
        """Record an entry that may be evicted until it is released, if it may leave this tier."""
        if entry.next_use is not None and self.is_host_memory:
            insort(self._residents, entry, key=_next_use)

    def victims(self, nbytes: int, next_use: float) -> list[Entry]:
        """Return entries to evict, used after `next_use`, latest first; none if too few."""
        chosen: list[Entry] = []
        missing = self.used_bytes + nbytes - self.capacity
        for entry in reversed(self._residents):
            if missing <= 0 or _next_use(entry) <= next_use:
                break
            chosen.append(entry)
            missing -= entry.nbytes
        return chosen if missing <= 0 else []


def _next_use(entry: Entry) -> float:
    assert entry.next_use is not None
    return entry.next_use


class HostTier(MemoryTier):
    """Host memory: a host tensor stays where it is, a device tensor is copied to a host buffer."""

    is_host_memory = True


class DeviceTier(MemoryTier):
    """The memory of the tensors' own device: they stay where they are, and nothing moves."""

    is_own_device = True


@dataclass(eq=False)
class Quota:
    """A capacity in bytes that several paths of a tier share."""

    capacity: int
    used_bytes: int = 0
    #: Tiers of several clients may have the same paths.
    lock: threading.Lock = field(default_factory=threading.Lock)


class PathTier(Tier):
    """One path, or several that work as one (MLP-Offload's virtual tier).

    Tickets are distributed over the paths in proportion to bandwidth; large ones are striped. Other
    tiers may use the queues too; `quotas` has those whose paths share a capacity.
    """

    def __init__(
        self, name: str, queues: Sequence[PathQueue], quotas: dict[PathQueue, Quota] | None = None
    ) -> None:
        self._quotas = quotas or {}
        # What limits each path: a quota that it shares with others, or its region.
        limits = {self._quotas.get(queue, queue.region) for queue in queues}
        capacities = (limit.capacity for limit in limits if isinstance(limit, Quota | Region))
        super().__init__(name, sum(capacities))
        self.queues = tuple(queues)
        self.regions = [q.region for q in self.queues if isinstance(q.region, Region)]
        # A checksum is computed by the host, which cannot read device memory.
        direct = all(queue.backend.device_memory for queue in self.queues)
        self.device_memory = direct and not any(queue.checksum for queue in self.queues)
        self._live = dict.fromkeys(self.queues, 0)
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes in extents on its paths, by any user."""
        return sum(region.used_bytes for region in self.regions)

    def claim_extents(self, nbytes: int, lead: int = 0) -> list[Stripe] | None:
        """Reserve extents for `nbytes`; None if the paths are full. May grow a file.

        The first `lead` bytes are not the ticket's, and are not verified.
        """
        if len(self.queues) == 1:
            with self._lock:
                stripe = self._claim_on(self.queues[0], 0, nbytes, lead)
            return None if stripe is None else [stripe]
        stripes: list[Stripe] = []
        open_queues = list(self.queues)
        begin = 0
        with self._lock:
            try:
                while begin < nbytes and open_queues:
                    live = [self._live[queue] for queue in open_queues]
                    parts = deal(nbytes - begin, live, _weights(open_queues))
                    # A part with an odd size comes last, so that all parts begin page-aligned.
                    dealt = [pair for pair in zip(open_queues, parts, strict=True) if pair[1]]
                    for queue, part in sorted(dealt, key=lambda pair: pair[1] % STRIPE_UNIT):
                        stripe = self._claim_on(queue, begin, part, lead)
                        if stripe is None:
                            open_queues.remove(queue)
                            break  # the rest is dealt anew, so that its odd part comes last again
                        stripes.append(stripe)
                        begin += part
            except BaseException:  # a path failed while its file grew
                self._free(stripes)
                raise
            if begin < nbytes:
                self._free(stripes)
                return None
            return stripes

    def release(self, entry: Entry) -> None:
        """Release an entry's extents."""
        stripes, entry.stripes = entry.stripes, ()
        self.release_extents(stripes)

    def release_extents(self, stripes: Sequence[Stripe]) -> None:
        """Release extents that no entry has."""
        with self._lock:
            self._free(stripes)

    def _claim_on(self, queue: PathQueue, begin: int, nbytes: int, lead: int) -> Stripe | None:
        assert isinstance(queue.region, Region)
        quota = self._quotas.get(queue)
        with nullcontext() if quota is None else quota.lock:
            if quota is not None and quota.used_bytes + nbytes > quota.capacity:
                return None
            extent = queue.region.allocate(nbytes)
            if extent is None:
                return None
            if quota is not None:
                quota.used_bytes += extent.nbytes
        self._live[queue] += nbytes
        digests = None
        if queue.checksum is not None:
            lead, block = 0 if begin else lead, queue.backend.block_size
            digests = queue.checksum.digests(nbytes, lead, block)
        return Stripe(queue, extent, begin, nbytes, digests)

    def _free(self, stripes: Sequence[Stripe]) -> None:
        for stripe in stripes:
            assert isinstance(stripe.queue.region, Region)
            stripe.queue.region.free(stripe.extent)
            self._live[stripe.queue] -= stripe.nbytes
            if (quota := self._quotas.get(stripe.queue)) is not None:
                with quota.lock:
                    quota.used_bytes -= stripe.extent.nbytes


def _weights(queues: Sequence[PathQueue]) -> list[float]:
    """Return the bandwidth of each path; unknown ones count as the average of the others."""
    rates = [queue.bandwidth.round_trip() for queue in queues]
    known = [rate for rate in rates if rate]
    usual = sum(known) / len(known) if known else 1.0
    return [rate or usual for rate in rates]


def deal(nbytes: int, live: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Split a ticket so that the bytes alive on each path are in proportion to its bandwidth.

    MLP-Offload deals T_i = M·B_i/ΣB of M subgroups to path i once; looking at what each holds now
    (`live`) gives the same for a tier that is filled at once, and new shares when a path slows
    down. Each unit goes where the bytes in proportion to bandwidth are fewest with it. Returns the
    bytes for each path.
    """
    unit = nbytes if nbytes < STRIPE_BYTES else STRIPE_UNIT
    parts = [0] * len(live)
    for begin in range(0, nbytes, unit):
        part = min(unit, nbytes - begin)
        lowest = min(range(len(live)), key=lambda i: (live[i] + parts[i] + part) / weights[i])
        parts[lowest] += part
    return parts
