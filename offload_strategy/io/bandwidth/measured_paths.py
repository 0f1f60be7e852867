"""The rates of a run's paths: known from earlier runs or a probe, and observed by this run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from offload_strategy.io.bandwidth.history import (
    MeasuredRate,
    PathIdentity,
    Rates,
    load_rates,
    save_rates,
    updated_rate,
)
from offload_strategy.io.bandwidth.probe import probe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Direction, get_logger
from offload_strategy.units import MiB, format_size

logger = get_logger(__name__)

#: Less than this is too little to tell a rate.
_MIN_SECONDS = 1.0
_MIN_BYTES = 64 * MiB


class RateComparison(NamedTuple):
    """A known rate and what the run observed while there was a queue; None is unknown."""

    path: Path
    direction: Direction
    expected: MeasuredRate | None
    observed: MeasuredRate | None


@dataclass(slots=True)
class _Path:
    identity: PathIdentity
    known: Rates


class MeasuredPaths:
    """The paths of one run, which `processes` use together."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._paths: dict[PathQueue, _Path] = {}

    def add(self, queue: PathQueue, path: Path) -> None:
        """Add a path as the config names it, and begin with the rates that earlier runs saved."""
        identity = PathIdentity.of(
            path, queue.region.fd, processes=self._processes, backend=queue.backend
        )
        self._begin_with(queue, _Path(identity, load_rates(identity)))

    def probe(self, queue: PathQueue) -> None:
        """Probe a path for a moment unless both of its directions are known."""
        path = self._paths[queue]
        if len(path.known) < len(Direction):
            assert isinstance(queue.region, Region)
            path.known = {**probe(queue.region, queue.backend), **path.known}
            self._begin_with(queue, path)

    def _begin_with(self, queue: PathQueue, path: _Path) -> None:
        self._paths[queue] = path
        queue.bandwidth.seed(**{str(way): known.rate for way, known in path.known.items()})

    def expected(self, queue: PathQueue, direction: Direction) -> float | None:
        """Bytes per second that were known when the run began, or None."""
        path = self._paths.get(queue)
        known = None if path is None else path.known.get(direction)
        return None if known is None else known.rate

    def comparisons(self) -> Iterator[RateComparison]:
        """Compare each direction of each path with what was known of it."""
        for queue, path in self._paths.items():
            place = Path(path.identity.path)
            for direction in Direction:
                known, observed = path.known.get(direction), _observed(queue, direction)
                yield RateComparison(place, direction, known, observed)

    def save(self) -> None:
        """Save what the run has observed for the next one, once. Never fails."""
        for queue, path in self._paths.items():
            after = dict(path.known)
            for direction in Direction:
                if (seen := _observed(queue, direction)) is None:
                    continue
                before = path.known.get(direction)
                after[direction] = updated_rate(before, seen.rate, seen.nbytes)
                logger.info(
                    "%s, %s: %.4g GB/s over %s%s; the next run begins with %.4g",
                    path.identity.path,
                    direction,
                    seen.rate / 1e9,
                    format_size(seen.nbytes),
                    "" if before is None else f", where {before.rate / 1e9:.4g} was expected",
                    after[direction].rate / 1e9,
                )
            if after != path.known:
                save_rates(path.identity, after)
        self._paths.clear()


def _observed(queue: PathQueue, direction: Direction) -> MeasuredRate | None:
    nbytes, seconds = queue.bandwidth.sustained(direction)
    if seconds < _MIN_SECONDS or nbytes < _MIN_BYTES:
        return None
    return MeasuredRate(nbytes / seconds, "observed", int(nbytes))
