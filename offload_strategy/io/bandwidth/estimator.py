"""The bandwidth of a path, estimated from the requests that it completed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from offload_strategy.telemetry import Direction

#: Seconds of busy time after which an observation counts half.
_HALF_LIFE_SECONDS = 0.5
#: By how much the transfers of a `RecentRate` count less after each further one.
_DECAY = 0.9
#: A seed (the rate of an earlier run or a probe) counts as much as this many seconds.
_SEED_SECONDS = 0.25


def round_trip_rate(read: float, write: float) -> float:
    """Bytes per second for bytes that are written once and read once: the harmonic mean.

    MLP-Offload (section 3.3) takes the smaller rate; but a byte costs the time of both directions.
    """
    return 2 / (1 / read + 1 / write)


class Begun(NamedTuple):
    """When a request began, and for how many seconds its path had been saturated until then."""

    at: float
    busy_seconds: float


class Transferred(NamedTuple):
    """Bytes that moved, and the seconds that they took."""

    nbytes: float = 0
    seconds: float = 0.0


class RecentRate:
    """The rate of the latest transfers: each counts more than those before it."""

    def __init__(self, nbytes: float = 0.0, seconds: float = 0.0) -> None:
        self._sums = Transferred(nbytes, seconds)

    def add(self, nbytes: float, seconds: float, decay: float = _DECAY) -> None:
        """Add a transfer, after which all earlier ones count less by a factor."""
        before = self._sums
        self._sums = Transferred(before.nbytes * decay + nbytes, before.seconds * decay + seconds)

    @property
    def rate(self) -> float | None:
        """Bytes per second, or None while nothing is known."""
        nbytes, seconds = self._sums
        return nbytes / seconds if seconds > 0 else None


class BandwidthEstimator:
    """Running estimates of a path's bandwidth, per direction; its queue is the only writer.

    Only time in which the path was saturated shows what it can do. A request's bytes count by the
    share of its time that was saturated, and each completed request accounts for the saturated time
    since the one before it, so a path that reads and writes at once divides its time between the
    two. A burst counts from when it saturated the path: completions are often noticed all at once,
    because threads wait for the interpreter lock.

    Besides there are sums for the whole run (`sustained`), in which each direction has its own
    time: what it carries under a load like this run's.
    """

    def __init__(self) -> None:
        self._recent = {direction: RecentRate() for direction in Direction}
        self._sustained = dict.fromkeys(Direction, Transferred())
        # Since when a direction has had more to move than the path takes.
        self._full_since: dict[Direction, float | None] = dict.fromkeys(Direction)
        # Seconds for which the path was saturated, those accounted for, and since when it is.
        self._busy_seconds = self._accounted_seconds = 0.0
        self._busy_since: float | None = None

    def seed(self, rates: Mapping[Direction, float]) -> None:
        """Begin with known rates in bytes per second."""
        for direction, rate in rates.items():
            self._recent[direction] = RecentRate(rate * _SEED_SECONDS, _SEED_SECONDS)

    def begins(self, now: float, *, saturated: bool) -> Begun:
        """Record a request, which may take the last slot."""
        if self._busy_since is not None:
            self._busy_seconds += now - self._busy_since
        self._busy_since = now if saturated else None
        return Begun(now, self._busy_seconds)

    def completed(
        self, direction: Direction, nbytes: int, now: float, begun: Begun, *, saturated: bool
    ) -> None:
        """Record the end of a request, for which `begins` returned `begun`."""
        busy = self.begins(now, saturated=saturated).busy_seconds
        share = (busy - begun.busy_seconds) / (now - begun.at) if now > begun.at else 0.0
        seconds, self._accounted_seconds = busy - self._accounted_seconds, busy
        decay = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
        self._recent[direction].add(nbytes * min(1.0, share), seconds, decay)

    def add_sustained(self, direction: Direction, nbytes: int, now: float, *, full: bool) -> None:
        """Record a completed request for the sums of the run.

        Its direction is still `full` if others of it wait, and one is in flight or begins at once.
        """
        since = self._full_since[direction]
        if since is not None:
            moved, seconds = self._sustained[direction]
            self._sustained[direction] = Transferred(moved + nbytes, seconds + now - since)
        self._full_since[direction] = now if full else None

    def sustained(self, direction: Direction) -> Transferred:
        """What a direction moved so far while its queue was never empty."""
        return self._sustained[direction]

    def rate(self, direction: Direction) -> float | None:
        """Current bytes per second of a direction, or None while nothing is known."""
        return self._recent[direction].rate

    def round_trip(self) -> float | None:
        """Bytes per second for bytes that are written once and read once, or None if unknown."""
        known = [rate for rate in map(self.rate, Direction) if rate]
        return round_trip_rate(known[0], known[-1]) if known else None
