"""A short measurement of a path: how fast it reads and writes, before training relies on it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import closing
from functools import partial
from queue import Empty, SimpleQueue
from timeit import default_timer as perf_counter

import torch

from offload_strategy.errors import OffloadError, StorageError
from offload_strategy.host_memory.buffers import HostBuffer
from offload_strategy.io.backends.posix import drop_from_cache
from offload_strategy.io.backends.protocol import Backend
from offload_strategy.io.backends.thread_pool import run_within
from offload_strategy.io.bandwidth.history import MeasuredRate, Rates
from offload_strategy.io.queues.moves import Move, Stripe
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.io.regions.region import Extent, Region
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.units import PAGE_BYTES, GiB, KiB, format_size

#: A probe never takes more of a path than this, nor more than this share of what is free.
MAX_BYTES = 1 * GiB
_SHARE_OF_FREE = 0.25
#: Smallest extent and smallest move.
_MIN_BYTES = 64 * KiB
#: The first moves are small, so that a slow path shows its rate early.
_FIRST_BYTES = 256 * KiB
#: Moves get no larger than allows about this many of them in the given time.
_MIN_MOVES = 8
#: A move that takes longer than this counts as lost.
STALLED_SECONDS = 60.0
#: After Ctrl-C transfers in flight are waited for no longer than this.
_INTERRUPTED_SECONDS = 5.0

#: Seconds; tests replace it.
_clock: Callable[[], float] = perf_counter
_Report = Callable[[float], object]


def probe(
    region: Region,
    backend: Backend,
    *,
    seconds: float = 0.25,
    nbytes: int = MAX_BYTES,
    on_progress: _Report = lambda share: None,
) -> Rates:
    """Write to, then read from, an extent of a region, and measure how fast that is.

    Takes about `seconds` in each direction, also on a slow path: nothing begins that would not be
    over in time. For buffered regions the write-out of the page cache is measured too. Uses
    `nbytes` of the path at most, or a quarter of what is free, if that is less. `on_progress` gets
    the share that is done, 0 to 1; if it raises, the probe ends with its error. Raises StorageError
    if the path is too full, fails, or does not answer for a minute.
    """
    rates: dict[Direction, MeasuredRate] = {}

    def progress(share: float) -> None:
        on_progress((len(rates) + share) / len(Direction))

    with closing(_Measurement(region, backend, nbytes)) as run:
        reach = run.extent.nbytes
        for direction in (Direction.WRITE, Direction.READ):
            # What was never written reads as zeros without touching the disk: read no further.
            nbytes, elapsed, reach = run.stream(direction, reach, seconds, progress)
            rates[direction] = MeasuredRate(nbytes / elapsed, "probe", nbytes)
            if not region.direct:  # reads are to reach the disk
                drop_from_cache(region.fd, *run.extent)
    return rates


def write_latencies(
    region: Region,
    backend: Backend,
    *,
    nbytes: int,
    seconds: float,
    most: int = 1000,
    on_progress: _Report = lambda share: None,
) -> list[float]:
    """Return how long each of at most so many writes took, one at a time, for `seconds`."""
    latencies: list[float] = []
    with closing(_Measurement(region, backend, 64 * nbytes, slot_bytes=nbytes)) as run:
        places, started, spent = run.extent.nbytes // nbytes, _clock(), 0.0
        while not latencies or (len(latencies) < most and spent < seconds):
            latencies.append(run.write_once(len(latencies) % places * nbytes, nbytes))
            spent = _clock() - started
            on_progress(min(1.0, spent / seconds))
    return latencies


class _Measurement:
    """The extent, the memory and the moves of one measurement.

    Moves keep the memory alive, even if a device never answers; the extent is freed after them.
    """

    def __init__(
        self, region: Region, backend: Backend, nbytes: int, slot_bytes: int | None = None
    ) -> None:
        least = slot_bytes or _MIN_BYTES
        size = max(min(nbytes, int(region.free_bytes * _SHARE_OF_FREE)), least)
        extent = region.allocate(size // PAGE_BYTES * PAGE_BYTES)
        if extent is None:
            raise StorageError(
                f"tier {region.tier!r}: {region.path} has no room for a measurement, which needs "
                f"{format_size(least)} in one piece. Free some space there, or name another path."
            )
        self.extent = extent
        self._region = region
        # A queue of its own: neither metrics nor the path lock see a measurement.
        self._queue = PathQueue(region, backend, Recorder())
        self._slots = max(1, backend.depth) if slot_bytes is None else 1
        block = min(backend.block_size, self.extent.nbytes) // PAGE_BYTES * PAGE_BYTES
        self._slot_bytes = slot_bytes or block
        self._moves: dict[int, Move] = {}  # by slot
        self._ended: SimpleQueue[tuple[int, Move, float]] = SimpleQueue()
        self._memory = _incompressible(self._slots, self._slot_bytes)

    def stream(
        self, direction: Direction, reach: int, seconds: float, report: _Report
    ) -> tuple[int, float, int]:
        """Move blocks of the first bytes over and over; return bytes, seconds and reach."""
        buffered, write = not self._region.direct, direction is Direction.WRITE
        size = min(_FIRST_BYTES, self._slot_bytes)
        position = moved = uncounted = 0
        elapsed, started = 0.0, _clock()
        while True:
            free = [slot for slot in range(self._slots) if slot not in self._moves]
            # A second round of buffered reads would be served by the page cache.
            while free and not (position >= reach and buffered and not write):
                if moved:
                    in_flight = sum(move.nbytes for move in self._moves.values())
                    ahead = (in_flight + uncounted + size) * elapsed / moved
                    if _clock() - started + ahead > seconds:
                        break
                begin = position % reach
                nbytes = min(size, reach - begin)
                self._submit(direction, begin, free.pop(), nbytes)
                position += nbytes
            if not self._moves:
                return moved, elapsed, min(position, reach)
            nbytes, finished = self._next()
            uncounted += nbytes
            if write and buffered:
                if self._moves and uncounted < self._slots * size:
                    continue  # a few per fdatasync
                finished = self._sync()
            moved, uncounted = moved + uncounted, 0
            elapsed = finished - started
            fits = int(moved / elapsed * seconds / _MIN_MOVES)
            size = min(self._slot_bytes, max(_MIN_BYTES, fits // PAGE_BYTES * PAGE_BYTES))
            report(min(1.0, elapsed / seconds))

    def write_once(self, offset: int, nbytes: int) -> float:
        """Write one tensor; returns how many seconds it took."""
        started = _clock()
        self._submit(Direction.WRITE, offset, 0, nbytes)
        _, finished = self._next()
        return (finished if self._region.direct else self._sync()) - started

    def close(self) -> None:
        """Cancel what is queued, wait for what is in flight, and free the extent."""
        interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        deadline = perf_counter() + (_INTERRUPTED_SECONDS if interrupted else STALLED_SECONDS)
        for move in self._moves.values():
            move.cancel()
        # A late write may still reach the extent: then it is not freed.
        if all(move.ended.wait(deadline - perf_counter()) for move in self._moves.values()):
            self._region.free(self.extent)

    def _submit(self, direction: Direction, begin: int, slot: int, nbytes: int) -> None:
        extent = Extent(self.extent.offset + begin, nbytes)
        ended = self._ended  # not `self`, which must not outlive an error with the moves
        self._moves[slot] = move = Move(
            client="probe",
            direction=direction,
            stripes=[Stripe(self._queue, extent, 0, nbytes)],
            address=self._memory.address + slot * self._slot_bytes,
            nbytes=nbytes,
            priority=Priority.WRITE_BACK,
            keep_alive=self._memory,
            on_end=lambda move: ended.put((slot, move, _clock())),
        )
        move.submit()

    def _next(self) -> tuple[int, float]:
        """Wait for the next move that ends; returns its bytes, and when it ended."""
        try:
            slot, move, ended_at = self._ended.get(timeout=STALLED_SECONDS)
        except Empty:
            raise self._no_answer() from None
        region = self._region
        del self._moves[slot]
        if move.state is MoveState.DONE:
            return move.nbytes, ended_at
        if isinstance(move.error, OffloadError):
            raise move.error
        raise StorageError(
            f"tier {region.tier!r}: measuring {region.path} failed on {format_size(move.nbytes)}: "
            f"{move.error}. Check the disk and the kernel's log, or name another path."
        ) from move.error

    def _sync(self) -> float:
        """Wait until written pages are on the disk; returns when they were."""
        sync = partial(os.fdatasync, self._region.fd)
        if (ended := run_within(STALLED_SECONDS, sync, "ssd-offload-probe")) is None:
            raise self._no_answer()
        ended.result()
        return _clock()

    def _no_answer(self) -> StorageError:
        return StorageError(
            f"tier {self._region.tier!r}: {self._region.path} has not answered for "
            f"{STALLED_SECONDS:.0f} seconds while it was measured. Check the device and the mount, "
            f"or name another path."
        )


def _incompressible(slots: int, nbytes: int) -> HostBuffer:
    """Memory of `slots` times `nbytes` random bytes, which are rotated for each slot.

    No two pages are equal, so a drive that compresses or deduplicates gains nothing.
    """
    memory = HostBuffer(slots * nbytes)
    content, _ = memory.acquire(slots * nbytes)
    block = torch.frombuffer(bytearray(os.urandom(nbytes)), dtype=torch.uint8)
    for slot, part in enumerate(content.split(nbytes)):
        part.copy_(block.roll(61 * slot))
    return memory
