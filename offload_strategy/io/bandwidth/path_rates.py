"""What is known of paths when a run begins, and what the run has to add to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from offload_strategy.io.bandwidth import history as remembered
from offload_strategy.io.bandwidth.estimator import Sustained
from offload_strategy.io.bandwidth.history import Figure, Figures, PathIdentity, corrected
from offload_strategy.io.bandwidth.probe import probe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Direction, get_logger
from offload_strategy.units import MiB, format_size

logger = get_logger(__name__)

#: What a path did for less than this says little about what it can do.
_LEAST_SECONDS = 1.0
_LEAST_BYTES = 64 * MiB


class PathStanding(NamedTuple):
    """One direction of a path: what was known of it, and what the run has seen so far.

    Args:
        path: of the config.
        direction: read or written.
        before: known when the run began; None if nothing was.
        sustained: bytes and seconds in which its queue was never empty.
    """

    path: Path
    direction: Direction
    before: Figure | None
    sustained: Sustained

    @property
    def observed(self) -> float | None:
        """Bytes per second that the run has seen, or None if it was too little to tell."""
        nbytes, seconds = self.sustained
        enough = seconds >= _LEAST_SECONDS and nbytes >= _LEAST_BYTES
        return nbytes / seconds if enough else None


@dataclass(slots=True)
class _Known:
    identity: PathIdentity
    figures: Figures = field(default_factory=dict)


class KnownPaths:
    """The paths of one run.

    Args:
        processes: that use them together.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._paths: dict[PathQueue, _Known] = {}

    def begin(self, queue: PathQueue, path: Path) -> None:
        """Begin with what earlier runs found out about a path.

        Args:
            queue: of the path.
            path: as in the config, where a process may have a folder of its own.
        """
        backend = queue.backend
        identity = PathIdentity.of(
            path,
            queue.region.fd,
            processes=self._processes,
            backend=type(backend).__name__,
            depth=backend.depth,
        )
        known = self._paths[queue] = _Known(identity, remembered.recall(identity))
        rates = {str(direction): figure.rate for direction, figure in known.figures.items()}
        queue.bandwidth.seed(**rates)

    def measure(self, queue: PathQueue) -> None:
        """Probe a path for a moment, unless both of its directions are known."""
        known = self._paths[queue]
        if len(known.figures) == len(Direction):
            return
        assert isinstance(queue.region, Region)
        found = probe(queue.region, queue.backend)
        probed = {
            Direction.READ: Figure(found.read, "probe", found.read_bytes),
            Direction.WRITE: Figure(found.write, "probe", found.written_bytes),
        }
        known.figures = probed | dict(known.figures)
        queue.bandwidth.seed(**{str(way): figure.rate for way, figure in known.figures.items()})

    def rate_before(self, queue: PathQueue, direction: Direction) -> float | None:
        """Bytes per second as they were known when the run began, or None."""
        known = self._paths.get(queue)
        figure = None if known is None else known.figures.get(direction)
        return None if figure is None else figure.rate

    def standings(self) -> Iterator[PathStanding]:
        """Of each direction of each path."""
        for queue, known in self._paths.items():
            for direction in Direction:
                yield self._standing(queue, known, direction)

    def end(self) -> None:
        """Keep what the run has found out, for the next one. Never fails."""
        for queue, known in self._paths.items():
            figures = dict(known.figures)
            seen = False
            for direction in Direction:
                standing = self._standing(queue, known, direction)
                rate, before = standing.observed, standing.before
                if rate is None:
                    continue
                seen = True
                after = corrected(before, rate, standing.sustained.nbytes)
                figures[direction] = after
                logger.info(
                    "%s, %s: %.4g GB/s over %s%s; the next run begins with %.4g",
                    standing.path,
                    direction,
                    rate / 1e9,
                    format_size(standing.sustained.nbytes),
                    "" if before is None else f", where {before.rate / 1e9:.4g} was expected",
                    after.rate / 1e9,
                )
            if seen:
                remembered.keep(known.identity, figures)
        self._paths.clear()

    @staticmethod
    def _standing(queue: PathQueue, known: _Known, direction: Direction) -> PathStanding:
        return PathStanding(
            Path(known.identity.path),
            direction,
            known.figures.get(direction),
            queue.bandwidth.sustained(direction),
        )
