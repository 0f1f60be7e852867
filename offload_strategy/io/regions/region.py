"""What a path queue reads and writes: the region of a tier, or an external file that is only read.

A region is an unlinked, owner-only, preallocated file, or a raw block device. Its extents are
page-aligned; adjacent free ones are merged.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import threading
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

from offload_strategy.config.directories import file_system_of
from offload_strategy.errors import ConfigError, StorageError, TierFullError
from offload_strategy.host_memory.arena import FreeRanges
from offload_strategy.io.regions import block_devices
from offload_strategy.io.regions.directory_check import RESERVE_BYTES, check_directory
from offload_strategy.io.regions.unnamed_files import create_unnamed, grow, switch_to_direct_io
from offload_strategy.telemetry import get_logger
from offload_strategy.units import PAGE_BYTES, GiB, MiB, format_size, round_up

logger = get_logger(__name__)

#: The file grows in steps of this size: few metadata operations, large contiguous ranges.
GROWTH_BYTES = 1 * GiB
#: Extents of at least this size take the lowest address, smaller ones the best fit.
LARGE_BYTES = 8 * MiB
#: So many of the lowest free ranges are compared for the best fit.
_RANGES_TRIED = 64


class Extent(NamedTuple):
    """A page-aligned range of a region: `offset` and `nbytes` are multiples of the page size."""

    offset: int
    nbytes: int


class ExtentAllocator:
    """Best fit for small extents, first fit for large ones; not thread-safe.

    Small extents fill gaps and never split a large hole. Large extents take a low address, so that
    the tickets of a step, which are written one after the other, are adjacent. Steps that write and
    free in the same pattern get the same extents again. What is before `begin` is not allocated.
    """

    def __init__(self, capacity: int, begin: int = 0) -> None:
        self.capacity = capacity // PAGE_BYTES * PAGE_BYTES
        self.used_bytes = 0
        self._free = FreeRanges(begin + self.capacity)
        if begin:
            self._free.take(0, begin)

    def allocate(self, nbytes: int) -> Extent | None:
        """Allocate an extent of at least `nbytes`, or None when no range is large enough."""
        size = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        large_enough = ((begin, end) for begin, end in self._free if end - begin >= size)
        tried = islice(large_enough, 1 if size >= LARGE_BYTES else _RANGES_TRIED)
        # What reaches the end was never used, or all behind it is free again: it comes last.
        ranked = ((end == self._free.size, end - begin, begin) for begin, end in tried)
        best = min(ranked, default=None)
        if best is None:
            return None
        start = best[2]
        self._free.take(start, size)
        self.used_bytes += size
        return Extent(start, size)

    def free(self, extent: Extent) -> None:
        """Free an extent; adjacent free ranges become one."""
        self.used_bytes -= extent.nbytes
        self._free.take_back(*extent)


class Region:
    """The bytes of one path of an ssd tier: an unnamed file in a directory, or a block device.

    The file vanishes with the process, also after `kill -9`. A block device is opened exclusively,
    its first megabyte is never written, and the used part is discarded at the end; after `kill -9`
    the bytes stay on it until they are overwritten.

    Without a `capacity` in bytes it has what the file system has free, or all of the device.
    `direct` is True, False, or ``"auto"`` (direct I/O where the file system supports it).
    `overwrite` uses a block device with data on it. Raises ConfigError for a path that is unfit.
    """

    def __init__(
        self,
        path: Path,
        tier: str,
        capacity: int | None = None,
        direct: bool | Literal["auto"] = "auto",
        *,
        overwrite: bool = False,
    ) -> None:
        self.tier, self.fd = tier, -1
        #: Why the file system had no room for the last allocation, if that was the reason.
        self.shortage: str | None = None
        #: What is before it on a device is never written; 0 for a file.
        self._begin = 0
        if block_devices.is_block_device(path):
            # Links such as those in /dev/disk/by-id are followed first.
            self.path, self.direct = path.resolve(), direct is not False
            self._begin = block_devices.HEAD_BYTES
            self.fd, available = block_devices.open_device(
                self.path, tier, overwrite=overwrite, direct=self.direct
            )
        elif overwrite:
            raise ConfigError(
                f"tier {tier!r}: overwrite: true is for block devices, and {str(path)!r} is not "
                f"one. Leave it out: files in a directory never replace others."
            )
        else:
            self.path = check_directory(path, tier)
            available = self._available()
        self.capacity = available if capacity is None else capacity
        if self.capacity > available:
            if self.fd >= 0:
                os.close(self.fd)
            raise ConfigError(
                f"tier {tier!r}: capacity is {format_size(self.capacity)}, but {self.path} has "
                f"only {format_size(available)} available, besides a reserve. Lower the capacity, "
                f"free some space, or name another path."
            )
        if not self._begin:
            self.fd, self.direct = self._open(direct)
        self._extents = ExtentAllocator(self.capacity, self._begin)
        self._reserved, self._used_end = 0, self._begin
        self._lock = threading.Lock()
        self._pid = os.getpid()

    # ------------------------------------------------------------------ extents
    def allocate(self, nbytes: int) -> Extent | None:
        """Allocate an extent for `nbytes`; None when the capacity or the disk is full."""
        with self._lock:
            if self.fd < 0:
                raise StorageError(f"tier {self.tier!r}: the region at {self.path} is closed")
            self.shortage = None
            extent = self._extents.allocate(nbytes)
            if extent is None:
                return None
            end = extent.offset + extent.nbytes
            try:
                if not self._begin:
                    self._reserve(end)
            except BaseException as error:
                self._extents.free(extent)
                if isinstance(error, TierFullError):
                    self.shortage = str(error)
                    return None
                raise
            self._used_end = max(self._used_end, end)
            return extent

    def free(self, extent: Extent) -> None:
        """Free an extent."""
        with self._lock:
            self._extents.free(extent)

    @property
    def used_bytes(self) -> int:
        """Bytes in allocated extents."""
        return self._extents.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that could still be allocated (fragmentation aside)."""
        return self._extents.capacity - self._extents.used_bytes

    def close(self) -> None:
        """Close the file, which frees its blocks, or discards the device. Idempotent."""
        with self._lock:
            fd, self.fd = self.fd, -1
        if fd < 0:
            return
        try:
            # Not in a forked child, which closes its copy while the parent uses the device.
            if self._begin and os.getpid() == self._pid:
                block_devices.discard(fd, self._begin, self._used_end - self._begin)
        finally:
            with contextlib.suppress(OSError):  # nobody needs the bytes any more
                os.close(fd)

    # ------------------------------------------------------------------ opening
    def _available(self) -> int:
        free = shutil.disk_usage(self.path).free
        if free - RESERVE_BYTES < PAGE_BYTES:
            raise ConfigError(
                f"tier {self.tier!r}: {self.path} has too little free space "
                f"({format_size(free)}): {format_size(RESERVE_BYTES)} are reserved "
                f"for others. Free some, or name another directory."
            )
        if file_system_of(self.path).is_memory:
            logger.warning(
                f"tier {self.tier!r}: {self.path} is a file system in main memory: what is written "
                f"there still uses host memory. Name a directory on a disk."
            )
        return free - RESERVE_BYTES

    def _open(self, direct: bool | Literal["auto"]) -> tuple[int, bool]:
        """Return a new file, and whether its I/O is direct."""
        where = f"tier {self.tier!r}: {self.path}"
        try:
            fd = create_unnamed(self.path)
        except OSError as error:
            raise ConfigError(
                f"tier {self.tier!r}: cannot create a file in {self.path}: {error.strerror}. "
                f"Check the mount and the permissions, or name another directory."
            ) from error
        try:
            is_direct = direct is not False and switch_to_direct_io(fd)
        except OSError as error:
            os.close(fd)
            raise ConfigError(
                f"{where} cannot be written and read: {error.strerror}. Check the disk and the "
                f"system's log, or name another directory."
            ) from error
        if direct is True and not is_direct:
            os.close(fd)
            raise ConfigError(
                f"{where} refuses direct I/O (io.direct: true). Use io.direct: auto for buffered "
                f"I/O there, or a directory on a local disk."
            )
        if direct == "auto" and not is_direct:
            logger.warning(
                f"{where} does not support direct I/O; using buffered I/O, which also fills the "
                f"page cache."
            )
        return fd, is_direct

    def _reserve(self, end: int) -> None:
        """Grow the file to at least `end`, in large steps, within what is free."""
        if end <= self._reserved:
            return
        target = end
        try:
            stats = os.fstatvfs(self.fd)
            free = max(0, stats.f_bavail * stats.f_frsize - RESERVE_BYTES)
            missing = end - self._reserved
            if missing > free:
                raise TierFullError(
                    f"{self.path} has {format_size(free)} available (besides a reserve of "
                    f"{format_size(RESERVE_BYTES)}), {format_size(missing)} more are needed"
                )
            step = min(round_up(missing, GROWTH_BYTES), free // PAGE_BYTES * PAGE_BYTES)
            target = max(end, min(self._reserved + step, round_up(self.capacity, PAGE_BYTES)))
            grow(self.fd, self._reserved, target)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise TierFullError(f"{self.path} is full") from error
            raise StorageError(
                f"tier {self.tier!r}: cannot grow the file in {self.path} to "
                f"{format_size(target)}: {error.strerror}. Check the disk and the system's log; "
                f"training cannot continue with this path."
            ) from error
        self._reserved = target


class ExternalFile:
    """An existing file, for instance a shard of a checkpoint, whose ranges are read as extents.

    It must not change meanwhile. Reads are recorded under the name `tier`, and bypass the page
    cache if the file system supports it. Raises ConfigError if it cannot be opened.
    """

    def __init__(self, path: Path, tier: str) -> None:
        self.path, self.tier, self.fd = path, tier, -1
        flag = getattr(os, "O_DIRECT", 0)
        self.direct = bool(flag)
        try:
            try:
                self.fd = os.open(path, os.O_RDONLY | flag)
            except OSError:
                self.fd, self.direct = os.open(path, os.O_RDONLY), False
            self._status = os.fstat(self.fd)
        except OSError as error:
            self.close()
            raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
        self.nbytes = self._status.st_size

    def cover(self, offset: int, nbytes: int) -> tuple[Extent, int]:
        """Return the page-aligned extent around a range inside the file, and its begin there."""
        if offset < 0 or nbytes < 0 or offset + nbytes > self.nbytes:
            raise StorageError(
                f"{self.path}: bytes {offset} to {offset + nbytes} were requested, but the file "
                f"has {format_size(self.nbytes)}. It may be truncated; fetch it again."
            )
        start = offset // PAGE_BYTES * PAGE_BYTES
        return Extent(start, round_up(offset + nbytes - start, PAGE_BYTES)), offset - start

    def check_unchanged(self) -> None:
        """Raise StorageError if the file was written to; it may have been renamed or unlinked."""
        now = os.fstat(self.fd)
        if (now.st_size, now.st_mtime_ns) != (self._status.st_size, self._status.st_mtime_ns):
            raise StorageError(
                f"{self.path} was written to while weights were still read from it. Load a "
                f"checkpoint without adopt=True if its files may change."
            )

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # nothing was written
                os.close(fd)
