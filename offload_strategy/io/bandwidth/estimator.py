"""What a path can carry, learned from the blocks that it carried."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from offload_strategy.io.bandwidth.probe import round_trip
from offload_strategy.telemetry import Direction

#: Seconds of busy time after which an observation counts half.
_HALF_LIFE_SECONDS = 0.5
#: A seed (a probe's figure) counts as much as this many seconds of observation.
_SEED_SECONDS = 0.25


class Sustained(NamedTuple):
    """What one direction of a path moved while its queue was never empty.

    Args:
        nbytes: moved.
        seconds: for which that went on, summed.
    """

    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class _Rate:
    nbytes: float = 0.0
    seconds: float = 0.0

    def add(self, nbytes: float, seconds: float) -> None:
        keep = 0.5 ** (seconds / _HALF_LIFE_SECONDS)
        self.nbytes = self.nbytes * keep + nbytes
        self.seconds = self.seconds * keep + seconds

    def value(self) -> float | None:
        return self.nbytes / self.seconds if self.seconds > 0 else None


@dataclass(slots=True)
class Bandwidth:
    """Running estimates of a path's bandwidth, per direction; its queue is the only writer.

    Only time in which the path was fully busy says what it can do: a path with one small block
    under way is slow because nobody asked for more. Of a request as many bytes count as its share
    of such time, and each that completes claims what there was since the completion before it, so
    a path that reads and writes at once splits its time between the two. A burst counts from when
    it filled the path: its requests are often noticed all at once, as their threads wait for the
    interpreter.

    Beside these figures of the moment there are sums for the whole run (`sustained`), in which a
    direction has its time to itself: what it carries under such a load as this run's.
    """

    _rates: dict[Direction, _Rate] = field(
        default_factory=lambda: {direction: _Rate() for direction in Direction}
    )
    #: Seconds for which the path was fully busy; since when it is; what is claimed already.
    _busy_seconds: float = 0.0
    _busy_since: float | None = None
    _claimed_seconds: float = 0.0
    _sustained: dict[Direction, Sustained] = field(
        default_factory=lambda: {direction: Sustained() for direction in Direction}
    )
    _full_since: dict[Direction, float | None] = field(
        default_factory=lambda: dict.fromkeys(Direction)
    )

    def seed(self, *, read: float | None = None, write: float | None = None) -> None:
        """Begin with measured figures, in bytes per second; None where there is none."""
        for direction, rate in ((Direction.READ, read), (Direction.WRITE, write)):
            if rate is not None:
                self._rates[direction] = _Rate(rate * _SEED_SECONDS, _SEED_SECONDS)

    def begins(self, now: float, *, saturated: bool) -> float:
        """Note that a request begins.

        Args:
            now: seconds.
            saturated: whether all slots are taken from now on.

        Returns:
            What `completed` is to be told of it.
        """
        return self._busy_until(now, saturated)

    def completed(
        self,
        direction: Direction,
        nbytes: int,
        now: float,
        *,
        begun: float,
        mark: float,
        saturated: bool,
    ) -> None:
        """Note a completed request.

        Args:
            direction: read or written.
            nbytes: its bytes.
            now: seconds.
            begun: when it began.
            mark: what `begins` said then.
            saturated: whether all slots are taken from now on.
        """
        busy = self._busy_until(now, saturated)
        share = (busy - mark) / (now - begun) if now > begun else 0.0
        self._rates[direction].add(nbytes * min(1.0, share), busy - self._claimed_seconds)
        self._claimed_seconds = busy

    def _busy_until(self, now: float, saturated: bool) -> float:
        """Seconds for which the path was fully busy until now; whether it is from now on."""
        if self._busy_since is not None:
            self._busy_seconds += now - self._busy_since
        self._busy_since = now if saturated else None
        return self._busy_seconds

    def carried(
        self, direction: Direction, nbytes: int, now: float, *, full: bool, goes_on: bool
    ) -> None:
        """Note a completed block for the sums of the run.

        Args:
            direction: read or written.
            nbytes: its bytes.
            now: seconds.
            full: whether its direction had more to move than the path took, until now.
            goes_on: whether other blocks of its direction are under way, or begin at once.
        """
        since = self._full_since[direction]
        if full and since is not None:
            before = self._sustained[direction]
            self._sustained[direction] = Sustained(
                before.nbytes + nbytes, before.seconds + now - since
            )
        self._full_since[direction] = now if full and goes_on else None

    def sustained(self, direction: Direction) -> Sustained:
        """What a direction moved so far while its queue was never empty."""
        return self._sustained[direction]

    def rate(self, direction: Direction) -> float | None:
        """Bytes per second in a direction, or None while nothing is known."""
        return self._rates[direction].value()

    def round_trip(self) -> float | None:
        """Bytes per second for bytes that are written once and read once, or None if unknown."""
        known = [rate for rate in map(self.rate, Direction) if rate]
        return round_trip(*known) if known else None
