"""A short measurement of a path: how fast it reads and writes, before training relies on it.

[Note: memory of a probe]
A request that was submitted to a backend cannot be cancelled, and uses its memory until it is done.
So each request's `on_done` refers to the memory: whatever happens to the probe (an error, a device
that stops answering), the memory lives until the last request is over. The extent is freed only
when nothing is in flight on it any more. Requests are submitted and waited for on a separate
thread, where Ctrl-C cannot arrive between two steps: Python delivers it to the main thread, which
then tells the other to stop.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeVar

from offload_strategy.errors import OffloadError, StorageError
from offload_strategy.io.backends.protocol import Backend, BlockRequest
from offload_strategy.io.bandwidth.history import MeasuredRate, Rates
from offload_strategy.io.regions.extents import Extent
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Direction
from offload_strategy.units import PAGE_BYTES, GiB, KiB, MiB, format_size

#: A probe never takes more of a path than this, nor more than this share of what is free.
MAX_BYTES = 1 * GiB
_SHARE_OF_FREE = 0.25
#: Smallest extent and smallest request.
_MIN_BYTES = 64 * KiB
#: The first requests are small, so that a slow path shows its rate early.
_FIRST_REQUEST_BYTES = 256 * KiB
#: Requests get no larger than allows about this many of them in the given time.
_MIN_REQUESTS = 8
#: A request that takes longer than this counts as lost.
STALLED_SECONDS = 60.0
#: After Ctrl-C or an error in the progress report, requests in flight are awaited for this long.
_GRACE_SECONDS = 5.0

#: Seconds; tests replace it.
_clock: Callable[[], float] = time.perf_counter
_T = TypeVar("_T")
_Report = Callable[[float], None]


def probe(
    region: Region,
    backend: Backend,
    *,
    seconds: float = 0.25,
    nbytes: int = MAX_BYTES,
    on_progress: _Report | None = None,
) -> Rates:
    """Write to, then read from, an extent of a region, and measure how fast that is.

    Takes about `seconds` in each direction, also on a slow path: no request begins that would not
    be over in time. For buffered regions the write-out of the page cache is measured too.

    Args:
        region: the path.
        backend: moves the blocks, `backend.depth` of them at a time.
        seconds: length of the measurement in each direction.
        nbytes: bytes of the path to use at most; a quarter of what is free, if that is less.
        on_progress: called now and then with the share that is done, 0 to 1. If it raises, the
            probe ends with its error.

    Raises:
        StorageError: the path is too full to measure, a read or a write failed, or the path did
            not answer for a minute.
    """

    def measure(run: _Measurement, report: _Report) -> Rates:
        written = run.stream(True, run.extent.nbytes, seconds, lambda done: report(done / 2))
        # What was never written reads as zeros without touching the disk: read no further.
        run.drop_cached()
        read = run.stream(False, written.reach, seconds, lambda done: report(0.5 + done / 2))
        return {
            Direction.READ: MeasuredRate(read.nbytes / read.seconds, "probe", read.nbytes),
            Direction.WRITE: MeasuredRate(
                written.nbytes / written.seconds, "probe", written.nbytes
            ),
        }

    return _on_own_thread(
        region, lambda: _Measurement(region, backend, nbytes), measure, on_progress
    )


def write_latencies(
    region: Region,
    backend: Backend,
    *,
    nbytes: int = 2 * MiB,
    seconds: float = 0.25,
    most: int = 1000,
    on_progress: _Report | None = None,
) -> list[float]:
    """Write tensors of `nbytes` one at a time, and return how many seconds each took.

    Args:
        region: the path.
        backend: moves the blocks; a tensor larger than its `block_size` needs several.
        nbytes: size of each write.
        seconds: stop after this long, with at least one write done.
        most: stop after this many.
        on_progress: as for `probe`.

    Raises:
        StorageError: as for `probe`.
    """

    def measure(run: _Measurement, report: _Report) -> list[float]:
        latencies: list[float] = []
        slots, started, spent = run.extent.nbytes // nbytes, _clock(), 0.0
        while not latencies or (len(latencies) < most and spent < seconds):
            latencies.append(run.write_once(len(latencies) % slots * nbytes, nbytes))
            spent = _clock() - started
            report(min(1.0, spent / seconds))
        return latencies

    return _on_own_thread(
        region,
        lambda: _Measurement(region, backend, 64 * nbytes, at_least=nbytes),
        measure,
        on_progress,
    )


class _Stopped(Exception):
    """Ends a measurement whose caller no longer waits for it."""


def _on_own_thread(
    region: Region,
    make: Callable[[], _Measurement],
    measure: Callable[[_Measurement, _Report], _T],
    on_progress: _Report | None,
) -> _T:
    """Run a measurement on its own thread, and report its progress on the calling one."""
    # Implemented in C: a put from any thread and an interrupted get leave no lock behind.
    progress: queue.SimpleQueue[float | None] = queue.SimpleQueue()
    results: list[_T] = []
    errors: list[BaseException] = []
    stop: list[bool] = []

    def report(share: float) -> None:
        if stop:
            raise _Stopped
        progress.put(share)

    def main() -> None:
        try:
            run = make()
            try:
                results.append(measure(run, report))
            finally:
                run.finish()
        except BaseException as error:
            errors.append(error)
        progress.put(None)

    thread = threading.Thread(target=main, name="ssd-offload-probe", daemon=True)
    try:
        thread.start()
        # The thread detects a silent path itself, unless it hangs in a system call.
        while (share := progress.get(timeout=3 * STALLED_SECONDS)) is not None:
            if on_progress is not None:
                on_progress(share)
    except queue.Empty:
        stop.append(True)
        raise _no_answer(region, 3 * STALLED_SECONDS) from None
    except BaseException:
        stop.append(True)
        if thread.ident is not None:  # otherwise it was never started
            thread.join(_GRACE_SECONDS)  # for what is in flight; on a dead path it goes on alone
        raise
    thread.join(_GRACE_SECONDS)
    try:
        if errors:
            raise errors[0]
        return results[0]
    finally:
        errors.clear()  # its frames refer to this list, and to the memory


def _no_answer(region: Region, seconds: float) -> StorageError:
    return StorageError(
        f"tier {region.tier!r}: {region.path} has not answered for {seconds:.0f} seconds while it "
        f"was measured. Check the device and the mount, or name another path."
    )


def _allocate(region: Region, nbytes: int, at_least: int) -> Extent:
    """Allocate `nbytes`, or what the region can spare, but no less than `at_least`."""
    spare = max(int(region.free_bytes * _SHARE_OF_FREE), at_least)
    size = min(max(nbytes, at_least), spare) // PAGE_BYTES * PAGE_BYTES
    while size >= at_least:
        extent = region.allocate(size)
        if extent is not None:
            return extent
        size = size // 2 // PAGE_BYTES * PAGE_BYTES
    raise StorageError(
        f"tier {region.tier!r}: {region.path} has no room for a measurement, which needs "
        f"{format_size(at_least)} in one piece. Free some space there, or name another path."
    )


class _Stream(NamedTuple):
    """What was moved in one direction; `reach` is the end of the part that was touched."""

    nbytes: int
    seconds: float
    reach: int


class _Completed(NamedTuple):
    slot: int
    nbytes: int
    error: BaseException | None
    at: float


class _Measurement:
    """The extent, the memory and the requests of one measurement."""

    def __init__(
        self, region: Region, backend: Backend, nbytes: int, at_least: int = _MIN_BYTES
    ) -> None:
        self.extent = _allocate(region, nbytes, at_least)
        self._region = region
        self._backend = backend
        self._slots = max(1, backend.depth)
        self._block = min(backend.block_size, self.extent.nbytes) // PAGE_BYTES * PAGE_BYTES
        self._in_flight = self._bytes_in_flight = 0
        self._over = False
        self._completed: queue.SimpleQueue[_Completed] = queue.SimpleQueue()
        try:
            self._memory = _incompressible(self._slots, self._block)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        except BaseException:
            region.free(self.extent)
            raise

    def stream(self, write: bool, reach: int, seconds: float, report: _Report) -> _Stream:
        """Move blocks through the first `reach` bytes of the extent, again and again."""
        buffered = not self._region.direct
        free = list(range(self._slots))
        size = min(_FIRST_REQUEST_BYTES, self._block)
        position = moved = uncounted = 0
        elapsed, started = 0.0, _clock()
        while True:
            # A second round of buffered reads would be served by the page cache.
            while free and not (position >= reach and buffered and not write):
                if moved:
                    ahead = (self._bytes_in_flight + uncounted + size) * elapsed / moved
                    if _clock() - started + ahead > seconds:
                        break
                begin = position % reach
                nbytes = min(size, reach - begin)
                self._submit(write, begin, free.pop(), nbytes)
                position += nbytes
            if not self._in_flight:
                return _Stream(moved, elapsed, min(position, reach))
            completed = self._next()
            free.append(completed.slot)
            uncounted += completed.nbytes
            finished = completed.at
            if write and buffered:
                if self._in_flight and uncounted < self._slots * size:
                    continue  # a few per fdatasync
                os.fdatasync(self._region.fd)
                finished = _clock()
            moved, uncounted = moved + uncounted, 0
            elapsed = finished - started
            fits = int(moved / elapsed * seconds / _MIN_REQUESTS)
            size = min(self._block, max(_MIN_BYTES, fits // PAGE_BYTES * PAGE_BYTES))
            report(min(1.0, elapsed / seconds))

    def write_once(self, offset: int, nbytes: int) -> float:
        """Write one tensor; returns how many seconds it took."""
        started = finished = _clock()
        position = 0
        while position < nbytes or self._in_flight:
            while position < nbytes and self._in_flight < self._slots:
                # The memory is only read here: blocks may share it.
                step = min(self._block, nbytes - position)
                self._submit(True, offset + position, 0, step)
                position += step
            finished = self._next().at
        if not self._region.direct:
            os.fdatasync(self._region.fd)
            finished = _clock()
        return finished - started

    def drop_cached(self) -> None:
        """Drop a buffered file from the page cache, so that reads reach the disk."""
        if not self._region.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._region.fd, *self.extent, os.POSIX_FADV_DONTNEED)

    def finish(self) -> None:
        """Wait for what is in flight, and free the extent; see [Note: memory of a probe]."""
        self._over = True
        deadline = time.monotonic() + STALLED_SECONDS
        while self._in_flight:
            try:
                self._completed.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return  # a late write may still reach the extent: it is not freed
            self._in_flight -= 1
        self._region.free(self.extent)

    # ------------------------------------------------------------------ requests
    def _submit(self, write: bool, begin: int, slot: int, nbytes: int) -> None:
        self._backend.submit(
            BlockRequest(
                write=write,
                fd=self._region.fd,
                offset=self.extent.offset + begin,
                address=self._address + slot * self._block,
                nbytes=nbytes,
                before=self._check,
                on_done=partial(self._complete, slot, nbytes),
            )
        )
        self._in_flight += 1
        self._bytes_in_flight += nbytes

    def _check(self) -> None:
        """Keep requests that are still queued at the end from beginning."""
        if self._over:
            raise _Stopped

    def _complete(self, slot: int, nbytes: int, error: BaseException | None) -> None:
        self._completed.put(_Completed(slot, nbytes, error, _clock()))

    def _next(self) -> _Completed:
        """Wait for the next completed request."""
        region = self._region
        try:
            completed = self._completed.get(timeout=STALLED_SECONDS)
        except queue.Empty:
            raise _no_answer(region, STALLED_SECONDS) from None
        self._in_flight -= 1
        self._bytes_in_flight -= completed.nbytes
        if isinstance(completed.error, OffloadError):
            raise completed.error
        if completed.error is not None:
            raise StorageError(
                f"tier {region.tier!r}: measuring {region.path} failed on a block of "
                f"{format_size(completed.nbytes)}: {completed.error}. Check the disk and the "
                f"kernel's log, or name another path."
            ) from completed.error
        return completed


def _incompressible(slots: int, nbytes: int) -> mmap.mmap:
    """Private memory of `slots` times `nbytes` random bytes.

    The random bytes are made once and rotated for each slot. No two pages are equal, so a drive
    that compresses or deduplicates gains nothing.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, slots * nbytes, flags=flags)
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), getattr(mmap, "MADV_DONTFORK", None)):
        if advice is not None:
            try:
                memory.madvise(advice)
            except OSError:
                continue  # kernels built without it
    block = os.urandom(nbytes)
    for slot in range(slots):
        shift = slot * 61 % nbytes
        memory.seek(slot * nbytes)
        memory.write(block[shift:])
        memory.write(block[:shift])
    return memory
