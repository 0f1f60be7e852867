"""Disks in memory, on which a simulation's system calls take time, fail, and may not meet."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from functools import partialmethod
from pathlib import Path
from typing import Any

from offload_strategy.errors import StorageError, TierFullError
from offload_strategy.io.regions.region import ExtentAllocator, ExternalFile, Region
from offload_strategy.units import PAGE_BYTES
from tests.simulation.scheduler import Scheduler, SimulatedLock

#: What a system call may do: raise this, or move less than it was asked for.
_ERRORS: dict[str, type[BaseException] | OSError] = {
    "fails": OSError(errno.EIO, "Input/output error"),
    "full": OSError(errno.ENOSPC, "No space left on device"),
    "again": BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    "memory": MemoryError("no memory"),
    "killed": SystemExit("the thread is ended"),
}
FAULTS = (*_ERRORS, "short", "nothing")
_FIRST_DESCRIPTOR = 1_000_000


class Disk:
    """The bytes of a region; `faults` await its next transfers, `dead` is for good."""

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.faults: list[str] = []
        self.dead = False
        self.seconds: tuple[float, ...] = (0.0,)


class SimulatedRegion(Region):
    """A region whose file is a simulated disk, and whose file system is full when the disk says."""

    def __init__(self, system: SimulatedSystem, capacity: int, path: Path | None = None) -> None:
        self.tier, self.shortage, self._begin = "nvme", None, 0
        self.fd, self.disk = system.open(capacity)
        self.path = path or Path(f"/{self.fd}")
        self.direct, self.capacity = True, capacity
        self._extents = ExtentAllocator(capacity)
        self._reserved, self._used_end, self._pid = 0, 0, os.getpid()
        self._lock = SimulatedLock(system.scheduler)  # type: ignore[assignment]
        self.refuses: list[str] = []

    def _reserve(self, end: int) -> None:
        if self.refuses:
            if self.refuses.pop() == "full":
                raise TierFullError("others have filled it")
            raise StorageError("cannot grow the file")

    def close(self) -> None:
        self.fd = -1


class SimulatedFile(ExternalFile):
    def __init__(self, system: SimulatedSystem, content: bytes) -> None:
        self.path, self.tier, self.direct = Path("/file"), "file", True
        self.nbytes = len(content)
        self.fd, self.disk = system.open(0)
        self.disk.data = bytearray(content)
        self.changed = False

    def check_unchanged(self) -> None:
        if self.changed:
            raise StorageError("it was written to")

    def close(self) -> None:
        self.fd = -1


class SimulatedSystem:
    """Stands for `os` in the backend."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._disks: list[Disk] = []
        # Of each transfer in flight: the disk, the range there, the range in memory, the direction.
        self._in_flight: list[tuple[int, int, int, int, int, bool]] = []

    def open(self, nbytes: int) -> tuple[int, Disk]:
        self._disks.append(Disk(nbytes))
        return _FIRST_DESCRIPTOR + len(self._disks) - 1, self._disks[-1]

    def __getattr__(self, name: str) -> Any:
        if name == "posix_fadvise":
            raise AttributeError(name)
        return getattr(os, name)

    def _move(self, fd: int, views: Sequence[memoryview], offset: int, *, write: bool) -> int:
        if not _FIRST_DESCRIPTOR <= fd < _FIRST_DESCRIPTOR + len(self._disks):
            raise OSError(errno.EBADF, "Bad file descriptor")
        disk, random, begin = self._disks[fd - _FIRST_DESCRIPTOR], self.scheduler.random, offset
        moves = []
        for view in (view.cast("B") for view in views):
            address = ctypes.addressof(ctypes.c_char.from_buffer(view))
            move = (fd, begin, begin + len(view), address, address + len(view), write)
            self._check_alone(move)
            moves.append(move)
            begin += len(view)
        self._in_flight += moves
        try:
            seconds = disk.seconds[random.randrange(len(disk.seconds))]
            if seconds:
                self.scheduler.sleep(seconds)
            fault = disk.faults.pop() if disk.faults else "fails" if disk.dead else ""
            if fault == "killed" and not self.scheduler.current.name.startswith("ssd-offload"):
                fault = "fails"  # a client's own thread is not ended here
            if fault in _ERRORS:
                error = _ERRORS[fault]
                raise type(error)(*error.args)  # type: ignore[misc]
            if fault == "nothing":
                return 0
            return self._copy(disk, views, offset, write, 1 if fault == "short" else 1 << 30)
        finally:
            for move in moves:
                self._in_flight.remove(move)

    preadv = partialmethod(_move, write=False)
    pwritev = partialmethod(_move, write=True)

    def _copy(
        self, disk: Disk, views: Sequence[memoryview], offset: int, write: bool, pages: int
    ) -> int:
        begin = offset
        for view in views:
            for at in range(0, len(view), PAGE_BYTES):
                page = view[at : at + PAGE_BYTES].cast("B")
                if write:
                    disk.data[offset : offset + len(page)] = page
                else:
                    there = disk.data[offset : offset + len(page)]
                    page[: len(there)] = there
                    if len(there) < len(page):
                        return offset + len(there) - begin
                offset += len(page)
                pages -= 1
                if not pages:
                    return offset - begin
                self.scheduler.point()
        return offset - begin

    def _check_alone(self, move: tuple[int, int, int, int, int, bool]) -> None:
        """No transfer may touch what a write is storing, nor memory that a read is filling."""
        fd, begin, end, low, high, write = move
        for fd2, begin2, end2, low2, high2, write2 in self._in_flight:
            if fd == fd2 and begin < end2 and begin2 < end and (write or write2):
                self.scheduler.fail(f"a transfer meets a write on the disk: {move}")
            if low < high2 and low2 < high and not (write and write2):
                self.scheduler.fail(f"a transfer meets a read in memory: {move}")
