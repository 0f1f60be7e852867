"""The rates of a run's paths: known from earlier runs or a probe, and observed by this run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from offload_strategy.io.bandwidth import history
from offload_strategy.io.bandwidth.history import MeasuredRate, PathIdentity, Rates
from offload_strategy.io.bandwidth.probe import probe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Direction, get_logger
from offload_strategy.units import MiB, format_size

logger = get_logger(__name__)

#: Less than this is too little to tell a rate.
_MIN_SECONDS = 1.0
_MIN_BYTES = 64 * MiB


class MeasuredPaths:
    """The paths of one run, which `processes` use together."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._paths: dict[PathQueue, tuple[PathIdentity, Rates]] = {}

    def add(self, queue: PathQueue, path: Path) -> None:
        """Add a path as the config names it, and begin with the rates that earlier runs saved."""
        identity = PathIdentity.of(
            path, queue.region.fd, processes=self._processes, backend=queue.backend
        )
        self._begin_with(queue, identity, history.load_rates(identity))

    def probe(self, queue: PathQueue) -> None:
        """Probe a path for a moment unless both of its directions are known."""
        identity, known = self._paths[queue]
        if len(known) < len(Direction):
            assert isinstance(queue.region, Region)
            self._begin_with(queue, identity, {**probe(queue.region, queue.backend), **known})

    def _begin_with(self, queue: PathQueue, identity: PathIdentity, known: Rates) -> None:
        self._paths[queue] = identity, known
        queue.bandwidth.seed({way: measured.rate for way, measured in known.items()})

    def expected(self, queue: PathQueue, direction: Direction) -> float | None:
        """Bytes per second that were known when the run began, or None."""
        known = self._paths[queue][1].get(direction) if queue in self._paths else None
        return None if known is None else known.rate

    def comparisons(self) -> Iterator[tuple[str, MeasuredRate | None, MeasuredRate | None]]:
        """Yield each direction of each path, what was known of it, and what the run observed."""
        for queue, (identity, known) in self._paths.items():
            for way in Direction:
                yield f"{identity.path} {way}", known.get(way), _observed(queue, way)

    def save(self) -> None:
        """Save what the run has observed for the next one, once. Never fails."""
        for queue, (identity, known) in self._paths.items():
            after = dict(known)
            for direction in Direction:
                if (seen := _observed(queue, direction)) is None:
                    continue
                before = known.get(direction)
                after[direction] = history.updated_rate(before, seen.rate, seen.nbytes)
                expected = f", where {before.rate / 1e9:.4g} was expected" if before else ""
                logger.info(
                    f"{identity.path}, {direction}: {seen.rate / 1e9:.4g} GB/s over "
                    f"{format_size(seen.nbytes)}{expected}; the next run begins with "
                    f"{after[direction].rate / 1e9:.4g}"
                )
            if after != known:
                history.save_rates(identity, after)
        self._paths.clear()


def _observed(queue: PathQueue, direction: Direction) -> MeasuredRate | None:
    nbytes, seconds = queue.bandwidth.sustained(direction)
    if seconds < _MIN_SECONDS or nbytes < _MIN_BYTES:
        return None
    return MeasuredRate(nbytes / seconds, "observed", int(nbytes))
