"""Unnamed files: created, preallocated and, where possible, accessed with direct I/O."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
from pathlib import Path

from offload_strategy.io.backends.posix import drop_from_cache, read_all, write_all
from offload_strategy.units import PAGE_BYTES, MiB

#: Without direct I/O, a `PageFile` waits for the write-out after this many bytes.
_DIRTY_BYTES = 32 * MiB


def create_unnamed(directory: Path) -> int:
    """Open an owner-only file that vanishes with its last descriptor, also after `kill -9`."""
    unnamed = getattr(os, "O_TMPFILE", 0)
    if unnamed:
        try:
            return os.open(directory, os.O_RDWR | unnamed | os.O_EXCL, 0o600)
        except OSError as error:
            # Errors of file systems that do not support unnamed files.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    name = directory / f".ssd-offload-{os.getpid()}-{secrets.token_hex(8)}"
    fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), 0o600)
    os.unlink(name)
    return fd


def _moves_pages(fd: int) -> bool:
    """Whether a page can be written and read back; OSError if the disk fails."""
    page = mmap.mmap(-1, PAGE_BYTES)
    page[:4] = b"page"
    try:
        return os.pwrite(fd, page, 0) == os.preadv(fd, [page], 0) == PAGE_BYTES
    except OSError as error:
        if error.errno == errno.EIO:
            raise
        return False


def switch_to_direct_io(fd: int) -> bool:
    """Switch an empty file to direct I/O; False without support for it, OSError if a disk fails."""
    direct = getattr(os, "O_DIRECT", 0)
    if not direct:
        return False
    from fcntl import F_GETFL, F_SETFL, fcntl

    flags = fcntl(fd, F_GETFL)
    try:
        fcntl(fd, F_SETFL, flags | direct)
    except OSError:
        return False
    moves = _moves_pages(fd)
    if not moves:
        fcntl(fd, F_SETFL, flags)
    os.ftruncate(fd, 0)
    return moves


def grow(fd: int, begin: int, end: int) -> None:
    """Grow a file from `begin` to `end` bytes, preallocated where the file system supports it."""
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, begin, end - begin)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, end)


class PageFile:
    """Reads and writes whole pages of a file that was empty, with direct I/O if that is supported.

    Else at most 32 MiB stay in the page cache.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffered = not switch_to_direct_io(fd) and hasattr(os, "posix_fadvise")
        self._dirty_bytes = 0

    def write(self, view: memoryview, offset: int) -> None:
        """Write whole pages; without direct I/O the last may be partial."""
        write_all(self._fd, view, offset)
        self._dirty_bytes += len(view)
        if self._buffered and self._dirty_bytes >= _DIRTY_BYTES:
            self.drain()

    def read(self, view: memoryview, offset: int) -> None:
        """Fill a view; memory and offset as for `write`. Raises OSError if the file ends before."""
        read_all(self._fd, view, offset, len(view))

    def drain(self) -> None:
        """Wait until what was written is on the disk, and drop it from the page cache."""
        self._dirty_bytes = 0
        if self._buffered:
            os.fdatasync(self._fd)
            drop_from_cache(self._fd)
