"""A short measurement of a path: how fast it reads and writes, before training relies on it.

[Note: who owns the memory of a probe]
A request that was handed to a backend cannot be called back, and writes to, or reads from, memory
until it is done. So every request carries the memory itself in its `on_done`: whatever happens to
the probe (an error, a device that stops answering), the memory stays until the last request is
over. Extents go back to the space only when nothing is under way on them any more. And requests are
made and waited for on a thread of its own, which Ctrl-C cannot end half-way: Python delivers it to
the main thread alone, which then asks the other to stop.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from offload_strategy.errors import OffloadError, StorageError
from offload_strategy.io.backends.protocol import Backend, BlockRequest
from offload_strategy.io.regions.extents import Extent
from offload_strategy.io.regions.region import Region
from offload_strategy.units import PAGE_BYTES, GiB, KiB, MiB, format_size

#: A probe never takes more of a path than this, nor more than this share of what is free.
MOST_BYTES = 1 * GiB
_SHARE_OF_FREE = 0.25
#: Below this many bytes there is nothing to measure.
_LEAST_BYTES = 64 * KiB
#: The first requests are small, so that a slow path tells its speed before much is asked of it.
_OPENING_BYTES = 256 * KiB
#: A probe is made of at least about this many requests.
_FEW = 8
#: A request that takes longer than this counts as lost.
STALLED_SECONDS = 60.0
#: Who gives a measurement up waits this long for what is under way.
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class PathBandwidth:
    """What `probe` measured.

    Args:
        read, write: bytes per second.
        read_seconds, write_seconds: how long each direction was measured.
        read_bytes, written_bytes: bytes moved in each direction.
    """

    read: float
    write: float
    read_seconds: float
    write_seconds: float
    read_bytes: int
    written_bytes: int

    @property
    def round_trip(self) -> float:
        """Bytes per second for bytes that are written once and read once; work is dealt by it."""
        return round_trip(self.read, self.write)


def round_trip(*rates: float) -> float:
    """Bytes per second of a way there and back at the given rates: their harmonic mean.

    MLP-Offload (section 3.3) deals by the smaller of the two rates. What is written here is read
    here, so the time that a byte costs its path is the sum of both ways.
    """
    return len(rates) / sum(1 / rate for rate in rates)


def probe(
    region: Region,
    backend: Backend,
    *,
    seconds: float = 0.25,
    nbytes: int = MOST_BYTES,
    on_progress: Callable[[float], None] | None = None,
) -> PathBandwidth:
    """Write to, then read from, a part of a space for a moment, and tell how fast that went.

    Takes about `seconds` in each direction, also on a slow path: no request begins that would not
    be over in time. Buffered spaces are measured with what they keep in the page cache written out.
    The extent goes back to the space.

    Args:
        region: the path.
        backend: what moves the blocks; `backend.depth` of them are under way at a time.
        seconds: length of the measurement in each direction.
        nbytes: bytes of the path to use at most; a quarter of what is free, if that is less.
        on_progress: called now and then with the share that is done, 0 to 1. If it raises, the
            probe ends with its error.

    Raises:
        StorageError: the path is too full to measure, a read or a write failed, or the path did
            not answer for a minute.
    """

    def measure(report: Callable[[float], None]) -> PathBandwidth:
        run = _Run(region, backend, _allocate(region, nbytes))
        try:
            written = run.stream(True, run.extent.nbytes, seconds, lambda done: report(done / 2))
            # What was never written reads as zeros without touching the disk: read no further.
            run.drop_cached()
            read = run.stream(False, written.reach, seconds, lambda done: report(0.5 + done / 2))
        finally:
            run.finish()
        return PathBandwidth(
            read=read.nbytes / read.seconds,
            write=written.nbytes / written.seconds,
            read_seconds=read.seconds,
            write_seconds=written.seconds,
            read_bytes=read.nbytes,
            written_bytes=written.nbytes,
        )

    return _on_own_thread(measure, region, on_progress)


def write_latencies(
    region: Region,
    backend: Backend,
    *,
    nbytes: int = 2 * MiB,
    seconds: float = 0.25,
    most: int = 1000,
    on_progress: Callable[[float], None] | None = None,
) -> list[float]:
    """Write tensors of `nbytes` one at a time, and return how many seconds each took.

    Args:
        region: the path.
        backend: what moves the blocks; a tensor larger than its `block_size` goes in several.
        nbytes: size of each write.
        seconds: stop after this long, with at least one write done.
        most: stop after this many.
        on_progress: as for `probe`.

    Raises:
        StorageError: as for `probe`.
    """

    def measure(report: Callable[[float], None]) -> list[float]:
        latencies: list[float] = []
        run = _Run(region, backend, _allocate(region, 64 * nbytes, at_least=nbytes))
        try:
            slots = run.extent.nbytes // nbytes
            started = time.perf_counter()
            spent = 0.0
            while not latencies or (len(latencies) < most and spent < seconds):
                latencies.append(run.write_once(len(latencies) % slots * nbytes, nbytes))
                spent = time.perf_counter() - started
                report(min(1.0, spent / seconds))
        finally:
            run.finish()
        return latencies

    return _on_own_thread(measure, region, on_progress)


_T = TypeVar("_T")


class _Stopped(Exception):
    """The caller does not want to know any more."""


def _on_own_thread(
    measure: Callable[[Callable[[float], None]], _T],
    region: Region,
    on_progress: Callable[[float], None] | None,
) -> _T:
    """Run a measurement on a thread of its own, and pass its progress on from this one."""
    # Written in C: a put from any thread and a get that is interrupted leave no lock behind.
    news: queue.SimpleQueue[float | None] = queue.SimpleQueue()
    results: list[_T] = []
    errors: list[BaseException] = []
    stop = threading.Lock()  # taken: stop. Unlike an event's, its `acquire` is one step.

    def report(share: float) -> None:
        if stop.locked():
            raise _Stopped
        news.put(share)

    def run() -> None:
        try:
            results.append(measure(report))
        except BaseException as error:
            errors.append(error)
        news.put(None)

    thread = threading.Thread(target=run, name="ssd-offload-probe", daemon=True)
    try:
        thread.start()
        # The other thread gives a silent path up sooner, unless the system keeps it in a call.
        while (share := news.get(timeout=3 * STALLED_SECONDS)) is not None:
            if on_progress is not None:
                on_progress(share)
    except queue.Empty:
        stop.acquire(blocking=False)
        raise _no_answer(region, 3 * STALLED_SECONDS) from None
    except BaseException:
        stop.acquire(blocking=False)
        if thread.ident is not None:  # else it never began
            thread.join(_GRACE_SECONDS)  # for what is under way; on a dead path it goes on alone
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


def _allocate(region: Region, nbytes: int, at_least: int = _LEAST_BYTES) -> Extent:
    """An extent of `nbytes`, or of what the space can spare, down to `at_least`."""
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


@dataclass(slots=True)
class _Stream:
    """What one direction came to; `reach` is the end of the part that was touched in full."""

    nbytes: int = 0
    seconds: float = 0.0
    reach: int = 0


@dataclass(slots=True)
class _Done:
    slot: int
    nbytes: int
    error: BaseException | None
    at: float = field(default_factory=time.perf_counter)


class _Run:
    """The memory and the requests of one measurement."""

    def __init__(self, region: Region, backend: Backend, extent: Extent) -> None:
        self.extent = extent
        self._region = region
        self._backend = backend
        self._slots = max(1, backend.depth)
        self._block = min(backend.block_size, extent.nbytes) // PAGE_BYTES * PAGE_BYTES
        self._under_way = self._bytes_under_way = 0
        self._over = False
        self._done: queue.SimpleQueue[_Done] = queue.SimpleQueue()
        try:
            self._memory = _incompressible(self._slots, self._block)
            self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        except BaseException:
            region.free(extent)
            raise

    # ------------------------------------------------------------------ measurements
    def stream(
        self, write: bool, reach: int, seconds: float, report: Callable[[float], None]
    ) -> _Stream:
        """Move blocks through the first `reach` bytes of the extent, again and again."""
        cached_path = not self._region.direct
        free = list(range(self._slots))
        result = _Stream()
        size = min(_OPENING_BYTES, self._block)
        position = uncounted = 0
        started = time.perf_counter()
        while True:
            while free and not (position >= reach and cached_path and not write):
                # A second round of buffered reads would be served by the page cache.
                if result.nbytes:
                    pace = result.seconds / result.nbytes
                    ahead = (self._bytes_under_way + uncounted + size) * pace
                    if time.perf_counter() - started + ahead > seconds:
                        break
                begin = position % reach
                nbytes = min(size, reach - begin)
                self._submit(write, begin, free.pop(), nbytes)
                position += nbytes
            if not self._under_way:
                break
            done = self._next()
            free.append(done.slot)
            uncounted += done.nbytes
            finished = done.at
            if write and cached_path:
                if self._under_way and uncounted < self._slots * size:
                    continue  # a few at a time
                os.fdatasync(self._region.fd)
                finished = time.perf_counter()
            result.nbytes, uncounted = result.nbytes + uncounted, 0
            result.seconds = finished - started
            fits = int(result.nbytes / result.seconds * seconds / _FEW)
            size = min(self._block, max(_LEAST_BYTES, fits // PAGE_BYTES * PAGE_BYTES))
            report(min(1.0, result.seconds / seconds))
        result.reach = min(position, reach)
        return result

    def write_once(self, offset: int, nbytes: int) -> float:
        """Write one tensor; returns how many seconds it took."""
        started = finished = time.perf_counter()
        position = 0
        while position < nbytes or self._under_way:
            while position < nbytes and self._under_way < self._slots:
                # The memory is only read here: two blocks may share it.
                step = min(self._block, nbytes - position)
                self._submit(True, offset + position, 0, step)
                position += step
            finished = self._next().at
        if not self._region.direct:
            os.fdatasync(self._region.fd)
            finished = time.perf_counter()
        return finished - started

    def drop_cached(self) -> None:
        """Empty the page cache of a buffered file, or reads would not reach the disk."""
        if not self._region.direct and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._region.fd, *self.extent, os.POSIX_FADV_DONTNEED)

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
                on_done=partial(_report, self._done, self._memory, slot, nbytes),
            )
        )
        self._under_way += 1
        self._bytes_under_way += nbytes

    def _check(self) -> None:
        """First on the backend's thread: what was still queued at the end stays undone."""
        if self._over:
            raise _Stopped

    def _next(self) -> _Done:
        """Wait for the next request that is over."""
        try:
            done = self._done.get(timeout=STALLED_SECONDS)
        except queue.Empty:
            raise _no_answer(self._region, STALLED_SECONDS) from None
        self._under_way -= 1
        self._bytes_under_way -= done.nbytes
        if isinstance(done.error, OffloadError):
            raise done.error
        if done.error is not None:
            raise StorageError(
                f"tier {self._region.tier!r}: measuring {self._region.path} failed on a block of "
                f"{format_size(done.nbytes)}: {done.error}. Check the disk and the kernel's log, "
                f"or name another path."
            ) from done.error
        return done

    def finish(self) -> None:
        """Wait for what is under way, and give the extent back. See the note at the top."""
        self._over = True
        deadline = time.monotonic() + STALLED_SECONDS
        while self._under_way:
            try:
                self._done.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return  # something may still be written there: the extent is not given back
            self._under_way -= 1
        self._region.free(self.extent)


def _report(
    done: queue.SimpleQueue[_Done],
    memory: mmap.mmap,
    slot: int,
    nbytes: int,
    error: BaseException | None,
) -> None:
    """End of a request; takes the memory along only to keep it alive until here."""
    done.put(_Done(slot, nbytes, error))


def _incompressible(slots: int, nbytes: int) -> mmap.mmap:
    """Private memory of `slots` times `nbytes` random bytes.

    Random once, and rotated for each slot: no page is the same as another, so that a drive which
    compresses or deduplicates has nothing to gain.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, slots * nbytes, flags=flags)
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), getattr(mmap, "MADV_DONTFORK", None)):
        if advice is not None:
            try:
                memory.madvise(advice)
            except OSError:
                continue  # advice only: kernels built without it go on unadvised
    block = os.urandom(nbytes)
    for slot in range(slots):
        turn = slot * 61 % nbytes
        memory.seek(slot * nbytes)
        memory.write(block[turn:])
        memory.write(block[:turn])
    return memory
