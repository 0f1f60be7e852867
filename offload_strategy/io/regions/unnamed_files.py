"""Files of ours on a disk: made without a name, grown in place, written past the page cache."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from pathlib import Path

from offload_strategy.io.backends.posix import is_buffered, read_all, write_all
from offload_strategy.units import PAGE_BYTES, MiB

try:
    from fcntl import F_GETFL, F_SETFL, fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

#: Where direct I/O cannot be had, so many bytes are written to the page cache before they are
#: waited for.
_DIRTY_BYTES = 32 * MiB


def create_unnamed(directory: Path, extra_flags: int = 0) -> int:
    """Make an owner-only file that ends with its last descriptor, `kill -9` included.

    Args:
        directory: on the file system to use.
        extra_flags: for `os.open`, on top of those for reading and writing.

    Returns:
        A descriptor.

    Raises:
        OSError: the file cannot be made there.
    """
    flags = os.O_RDWR | extra_flags | getattr(os, "O_CLOEXEC", 0)
    unnamed = getattr(os, "O_TMPFILE", 0)
    if unnamed:
        try:
            return os.open(directory, flags | unnamed | getattr(os, "O_EXCL", 0), 0o600)
        except OSError as error:
            # File systems without unnamed files answer in one of these three ways.
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                raise
    name = directory / f".ssd-offload-{os.getpid()}-{secrets.token_hex(8)}"
    flags |= os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    fd = os.open(name, flags, 0o600)
    os.unlink(name)
    return fd


def takes_direct_io(fd: int) -> bool:
    """Whether a page really goes out and comes back (some file systems only accept the flag).

    Args:
        fd: of a file that is opened for direct I/O and is empty, as it is afterwards.

    Raises:
        OSError: the disk fails.
    """
    page = mmap.mmap(-1, PAGE_BYTES)
    try:
        page[:4] = b"page"
        if os.pwrite(fd, page, 0) != PAGE_BYTES or os.preadv(fd, [page], 0) != PAGE_BYTES:
            return False
        os.ftruncate(fd, 0)
        return True
    except OSError as error:
        if error.errno == errno.EIO:
            raise
        return False
    finally:
        page.close()


def switch_to_direct_io(fd: int) -> None:
    """Go on with direct I/O on an empty file, if its file system takes it.

    Raises:
        OSError: the disk fails.
    """
    direct = getattr(os, "O_DIRECT", 0)
    if fcntl is None or not direct:
        return
    flags = fcntl(fd, F_GETFL)
    try:
        fcntl(fd, F_SETFL, flags | direct)
    except OSError:
        return
    if not takes_direct_io(fd):
        fcntl(fd, F_SETFL, flags)
        os.ftruncate(fd, 0)


def grow(fd: int, begin: int, end: int) -> None:
    """Make a file reach to `end`, with room on the disk where the file system can promise it.

    Args:
        fd: of the file.
        begin: where the file ends now.
        end: where it shall end.

    Raises:
        OSError: ENOSPC when the disk is full, others when it fails.
    """
    if hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(fd, begin, end - begin)
            return
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
    os.ftruncate(fd, end)


class PageFile:
    """Moves whole pages of one file, and leaves at most 32 MiB of them in the page cache.

    The memory that a checkpoint takes while it is written would else be that of the whole: in a
    memory cgroup written pages count until they are on the disk.

    Args:
        fd: of the file; stays the caller's.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._buffered = is_buffered(fd)
        self._dirty_bytes = 0

    def write(self, view: memoryview, offset: int) -> None:
        """Write every byte.

        Args:
            view: page-aligned memory, whole pages; the last one may be cut short only where direct
                I/O is not used.
            offset: in the file, page-aligned.

        Raises:
            OSError: the disk is full, or fails.
        """
        write_all(self._fd, view, offset)
        self._dirty_bytes += len(view)
        if self._buffered and self._dirty_bytes >= _DIRTY_BYTES:
            self.drain()

    def read(self, view: memoryview, offset: int) -> None:
        """Fill a view; memory and offset as for `write`.

        Raises:
            OSError: the file ends before, or the disk fails.
        """
        read_all(self._fd, view, offset, len(view))

    def drain(self) -> None:
        """Wait until what was written is on the disk, and take it out of the page cache.

        Raises:
            OSError: it could not be written.
        """
        self._dirty_bytes = 0
        if self._buffered:
            os.fdatasync(self._fd)
            with contextlib.suppress(OSError):  # advice only
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
