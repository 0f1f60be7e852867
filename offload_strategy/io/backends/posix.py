"""The posix backend: positioned I/O on threads, direct where the file was opened so.

Plain threads reach the disk's limit because `os.preadv` and `os.pwritev` release the interpreter
lock for the whole call; no compiled code is needed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.io.backends.threaded import ThreadedBackend, view_of
from offload_strategy.units import PAGE_BYTES, round_up

try:
    from fcntl import F_GETFL, fcntl
except ImportError:  # not a POSIX system: `inspect_directory` refuses ssd tiers there
    fcntl = None  # type: ignore[assignment]

#: A system call that answers "try again" is repeated for this long.
RETRY_SECONDS = 30.0
_LONGEST_PAUSE_SECONDS = 0.1
#: A written block is still being written out when the call returns; so many blocks later it is
#: clean and leaves the page cache when it is advised again.
_BLOCKS_UNTIL_CLEAN = 4
#: Far fewer than a system call takes (IOV_MAX): each has to end on its own.
_MOST_NEIGHBOURS = 64


def why_not() -> str | None:
    """Why this backend cannot run here, or None if it can."""
    if hasattr(os, "preadv") and hasattr(os, "pwritev"):
        return None
    return "this system has no positioned file I/O (os.preadv, os.pwritev)"


class PosixBackend(ThreadedBackend):
    """`os.preadv` and `os.pwritev` on a few threads that leave when idle.

    Where a file was opened without direct I/O, what was moved is dropped from the page cache: it
    is read once, and the memory is better used by the training.
    """

    most_neighbours = _MOST_NEIGHBOURS

    def __init__(self, *, threads: int, block_size: int) -> None:
        super().__init__(threads=threads, block_size=block_size)
        self._cached = _CachedBlocks()

    def moved_together(self, requests: Sequence[BlockRequest]) -> bool:
        """Move neighbours by one system call; False where not every byte moved."""
        first = requests[0]
        views = [view_of(r.address, round_up(r.nbytes, PAGE_BYTES)) for r in requests]
        nbytes = sum(map(len, views))
        self._cached.will_move(first.fd, first.offset, nbytes)
        call = os.pwritev if first.write else os.preadv
        try:
            done = call(first.fd, views, first.offset)
        except OSError:
            return False
        self._cached.drop()
        return done == nbytes

    def write_pages(self, fd: int, view: memoryview, offset: int) -> None:
        """Write every byte; short writes go on where they stopped."""
        self._cached.will_move(fd, offset, len(view))
        write_all(fd, view, offset)
        self._cached.drop()

    def read_pages(self, fd: int, view: memoryview, offset: int, needed: int) -> None:
        """Read until `needed` bytes have come; the end of the file before that is an error."""
        self._cached.will_move(fd, offset, len(view))
        read_all(fd, view, offset, needed)
        self._cached.drop()


class _CachedBlocks(threading.local):
    """The last blocks that a thread moved through the page cache."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, int, int]] = deque()
        self._pending = False

    def will_move(self, fd: int, offset: int, nbytes: int) -> None:
        """Note a block if the page cache is used for its file."""
        self._pending = is_buffered(fd)
        if self._pending:
            self._blocks.append((fd, offset, nbytes))

    def drop(self) -> None:
        """Start the write-out of the block just moved, and let go of an earlier one."""
        if not self._pending:
            return
        _forget(*self._blocks[-1])
        while len(self._blocks) > _BLOCKS_UNTIL_CLEAN:
            _forget(*self._blocks.popleft())


def is_buffered(fd: int) -> bool:
    """Whether I/O on a file goes through the page cache, and can be told to leave it."""
    if not hasattr(os, "posix_fadvise"):
        return False
    try:
        return not fcntl(fd, F_GETFL) & getattr(os, "O_DIRECT", 0)
    except OSError:
        return False  # the move itself will tell


def _forget(fd: int, offset: int, nbytes: int) -> None:
    # Advice only. For dirty pages the call starts the write-out; clean ones leave the page cache.
    # The file may have been closed since, and its number may be another's: no harm but a page.
    with contextlib.suppress(OSError):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def write_all(fd: int, view: memoryview, offset: int) -> None:
    """Write every byte; short writes go on where they stopped.

    Raises:
        OSError: the disk is full, fails, or takes nothing.
    """
    while view:
        done = _persist(os.pwritev, fd, view, offset)
        if done == 0:
            raise OSError(errno.EIO, f"wrote nothing at offset {offset}, {len(view)} bytes left")
        view, offset = view[done:], offset + done


def read_all(fd: int, view: memoryview, offset: int, needed: int) -> None:
    """Read until `needed` bytes have come; the view may be longer, up to its last page's end.

    Raises:
        OSError: the disk fails, or the file ends before that.
    """
    while needed > 0:
        try:
            done = _persist(os.preadv, fd, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or offset % PAGE_BYTES == 0:
                raise
            done = 0  # direct I/O cannot go on where the file ended within a page
        if done == 0:
            raise OSError(errno.EIO, f"end of file at offset {offset}, {needed} bytes missing")
        view, offset, needed = view[done:], offset + done, needed - done


def _persist(
    call: Callable[[int, list[memoryview], int], int], fd: int, view: memoryview, offset: int
) -> int:
    """Make a system call; repeat it, with pauses, while the answer is to try again.

    Python itself repeats calls that a signal interrupted.
    """
    deadline, pause = 0.0, 0.001
    while True:
        try:
            return call(fd, [view], offset)
        except BlockingIOError:  # EAGAIN, EWOULDBLOCK
            now = time.monotonic()
            deadline = deadline or now + RETRY_SECONDS
            if now >= deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
