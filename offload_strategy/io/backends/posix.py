"""The posix backend: positioned I/O on threads, direct where the file was opened for direct I/O.

Plain threads reach the disk's limit because `os.preadv` and `os.pwritev` release the interpreter
lock for the whole call; no compiled code is needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from timeit import default_timer as perf_counter

from offload_strategy.errors import StorageError
from offload_strategy.host_memory.buffers import HostBuffer
from offload_strategy.io.backends.protocol import Backend, BlockRequest
from offload_strategy.units import PAGE_BYTES, round_up

#: A system call that fails with EAGAIN is repeated for this long.
RETRY_SECONDS = 30.0
_MAX_PAUSE_SECONDS = 0.1
#: A written block is still being written out when the call returns. This many blocks later it is
#: clean, and advising the kernel again drops it from the page cache.
_BLOCKS_UNTIL_CLEAN = 4


def unavailable_reason() -> str | None:
    """Why this backend cannot run here, or None if it can."""
    if hasattr(os, "preadv") and hasattr(os, "pwritev"):
        return None
    return "this system has no positioned file I/O (os.preadv, os.pwritev)"


class PosixBackend(Backend):
    """`os.preadv` and `os.pwritev` on a few threads that end when they are idle.

    Blocks in page-aligned memory move without a copy. Others, and a partial last page that is read,
    pass through one block-sized buffer per thread. A partial last page that is written includes the
    rest of its page: memory and extents consist of whole pages. Buffered blocks are dropped from
    the page cache, because they are read only once.
    """

    max_adjacent = 64  # far below IOV_MAX, because each of them has to be completed on its own

    def __init__(self, *, threads: int, block_size: int) -> None:
        super().__init__(threads=threads, block_size=block_size)
        self._bounce = BounceBuffer(block_size)
        self._cached = _CachedBlocks()

    def submit(self, requests: Sequence[BlockRequest]) -> None:
        """Begin adjacent requests, if possible with one system call."""
        left = list(requests)
        self.threads.submit(partial(self._run_all, left), partial(_fail_all, left))

    def close(self) -> None:
        """Finish what was submitted, end the threads for good and free the caller's buffer."""
        super().close()
        self.__dict__.pop("_bounce", None)

    def _run_all(self, left: list[BlockRequest]) -> None:
        moved = len(left) > 1 and self.move_adjacent(left)
        while left:
            request, error = left[0], None
            try:
                if not moved:  # an error of all together may be the error of only one
                    self.run(request)
                elif request.after is not None:
                    request.after()
            except Exception as caught:
                error = caught
            # No call between these two: see [Note: threads that die] in thread_pool.py.
            del left[0]
            request.on_done(error)

    def run(self, request: BlockRequest) -> None:
        """Perform all of a request except `on_done`."""
        if request.before is not None:
            request.before()
        self.move(request)
        if request.after is not None:
            request.after()

    def move(self, request: BlockRequest) -> None:
        """Move a request's bytes."""
        whole = request.nbytes // PAGE_BYTES * PAGE_BYTES
        if request.address % PAGE_BYTES:
            whole = 0
        elif request.write or request.is_buffer:
            whole = round_up(request.nbytes, PAGE_BYTES)
        if whole:
            view = view_of(request.address, whole)
            self.move_pages(request, view, request.offset, min(whole, request.nbytes))
        rest = request.nbytes - whole
        if rest > 0:
            bounce = self._bounce
            padded = bounce.view[: round_up(rest, PAGE_BYTES)]
            if request.write:
                ctypes.memmove(bounce.address, request.address + whole, rest)
            self.move_pages(request, padded, request.offset + whole, rest)
            if not request.write:
                ctypes.memmove(request.address + whole, bounce.address, rest)

    def move_adjacent(self, requests: Sequence[BlockRequest]) -> bool:
        """Move adjacent blocks with one system call; False unless every byte moved."""
        first = requests[0]
        for request in requests:
            if request.before is not None:
                request.before()
        views = [view_of(r.address, round_up(r.nbytes, PAGE_BYTES)) for r in requests]
        nbytes = sum(map(len, views))
        call = os.pwritev if first.write else os.preadv
        try:
            done = call(first.fd, views, first.offset)
        except OSError:
            return False
        self._cached.moved(first, first.offset, nbytes)
        return done == nbytes

    def move_pages(self, request: BlockRequest, view: memoryview, offset: int, needed: int) -> None:
        """Move whole pages; the file may end after `needed` bytes of a read."""
        if request.write:
            write_all(request.fd, view, offset)
        else:
            read_all(request.fd, view, offset, needed)
        self._cached.moved(request, offset, len(view))


def _fail_all(left: list[BlockRequest], error: BaseException) -> None:
    """Complete the requests that are left with what ended the thread."""
    for request in left:
        reason = error
        if not isinstance(error, Exception):
            # A SystemExit or KeyboardInterrupt that was meant for this thread must not be raised
            # again in the one that waits for the bytes.
            reason = StorageError(
                f"the thread that moved {request.nbytes} bytes at offset {request.offset} was "
                f"ended by {type(error).__name__}"
            )
            reason.__cause__ = error
        request.on_done(reason)


class BounceBuffer(threading.local):
    """One page-aligned buffer per thread, for memory that direct I/O cannot use."""

    def __init__(self, nbytes: int) -> None:
        self._memory = HostBuffer(nbytes)
        self.address = self._memory.address
        self.view = view_of(self.address, self._memory.nbytes).cast("B")


class _CachedBlocks(threading.local):
    """The blocks that a thread last moved through the page cache."""

    def __init__(self) -> None:
        self._blocks: deque[tuple[int, int, int]] = deque()

    def moved(self, request: BlockRequest, offset: int, nbytes: int) -> None:
        """Start the write-out of a block, and drop an earlier one."""
        if request.direct:
            return
        self._blocks.append((request.fd, offset, nbytes))
        drop_from_cache(request.fd, offset, nbytes)
        while len(self._blocks) > _BLOCKS_UNTIL_CLEAN:
            drop_from_cache(*self._blocks.popleft())


def view_of(address: int, nbytes: int) -> memoryview:
    """Return memory as a view, which does not keep it alive."""
    return memoryview((ctypes.c_char * nbytes).from_address(address))


def drop_from_cache(fd: int, offset: int = 0, nbytes: int = 0) -> None:
    """Advise the kernel that nobody needs the cached pages of a range, or of a whole file."""
    # For dirty pages the call starts the write-out; clean pages leave the page cache. If the file
    # was closed and its descriptor reused, another file loses a few cached pages, nothing more.
    with contextlib.suppress(OSError, AttributeError):  # AttributeError: no advice there
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def write_all(fd: int, view: memoryview, offset: int) -> None:
    """Write every byte, continuing short writes; OSError if the disk fails or accepts nothing."""
    while view:
        done = _retry(os.pwritev, fd, view, offset)
        if done == 0:
            raise OSError(errno.EIO, f"wrote nothing at offset {offset}, {len(view)} bytes left")
        view, offset = view[done:], offset + done


def read_all(fd: int, view: memoryview, offset: int, needed: int) -> None:
    """Read at least `needed` bytes, up to a page more; raises OSError if that fails."""
    while needed > 0:
        try:
            done = _retry(os.preadv, fd, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or offset % PAGE_BYTES == 0:
                raise
            done = 0  # direct I/O cannot continue where the file ended within a page
        if done == 0:
            raise OSError(errno.EIO, f"end of file at offset {offset}, {needed} bytes missing")
        view, offset, needed = view[done:], offset + done, needed - done


def _retry(
    call: Callable[[int, list[memoryview], int], int], fd: int, view: memoryview, offset: int
) -> int:
    """Repeat a system call, with pauses, while it fails with EAGAIN."""
    deadline, pause = 0.0, 0.001
    while True:
        try:
            return call(fd, [view], offset)
        except BlockingIOError:  # EAGAIN, EWOULDBLOCK
            now = perf_counter()
            deadline = deadline or now + RETRY_SECONDS
            if now >= deadline:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)
