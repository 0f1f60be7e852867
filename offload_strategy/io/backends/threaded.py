"""What backends on threads have in common: the threads, what comes before and after, alignment."""

from __future__ import annotations

import ctypes
import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

from offload_strategy.errors import StorageError
from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.io.backends.thread_pool import Workers
from offload_strategy.units import PAGE_BYTES, round_up

# A direct pointer type: foreign calls through it release the interpreter lock while copying.
_memmove = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class ThreadedBackend(ABC):
    """Runs each request on a thread; a subclass moves page-aligned memory.

    Blocks whose memory is page-aligned move without a copy; others, and the last part of a page
    that is read, pass through one small buffer per thread, so that a tensor of any alignment costs
    no second buffer of its size. A last part of a page that is written takes the rest of its page
    along: memory and extents are there by whole pages.

    Args:
        threads: requests under way at once in each direction.
        block_size: bytes a request may carry at most, a multiple of the page size.
    """

    device_memory: bool = False
    #: How many requests `submit_neighbours` takes at most.
    most_neighbours: int = 1

    def __init__(self, *, threads: int, block_size: int) -> None:
        self.depth = threads
        self.block_size = block_size
        # One pool for both directions: who submits no more than `depth` of each, or twice as many
        # small ones, finds a thread for a read even when every write is stuck.
        self._workers = Workers("ssd-offload-io", 4 * threads)
        self._bounce = Bounce(block_size)

    def submit(self, request: BlockRequest) -> None:
        """Begin a request; `on_done` is called on one of the backend's threads."""
        self.submit_neighbours([request])

    def submit_neighbours(self, requests: Sequence[BlockRequest]) -> None:
        """Begin requests of one direction and file, of page-aligned memory, that touch each other.

        Their ranges of the file, each up to the end of its last page, follow each other in this
        order. Each `on_done` is called, in this order, as if they were submitted one by one.
        """
        run = _Run(self, requests)
        self._workers.submit(run, run.end)

    @property
    def not_begun(self) -> int:
        """Requests that no thread has begun."""
        return self._workers.not_begun

    def help(self, what: str) -> bool:
        """Run a request that has not begun on the calling thread; False if there is none.

        Args:
            what: for the message, if the path does not answer.
        """
        return self._workers.help(what)

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        self._workers.close()

    @abstractmethod
    def write_pages(self, fd: int, view: memoryview, offset: int) -> None:
        """Write page-aligned memory, whole pages, at a page-aligned offset; every byte or raise."""

    @abstractmethod
    def read_pages(self, fd: int, view: memoryview, offset: int, needed: int) -> None:
        """Read into page-aligned memory; the file may end once `needed` bytes have come."""

    def moved_together(self, requests: Sequence[BlockRequest]) -> bool:
        """Move the bytes of neighbours, if all can be moved at once."""
        return False

    def run(self, request: BlockRequest) -> None:
        """Do all of a request but `on_done`, on the calling thread."""
        if request.before is not None:
            request.before()
        self.move(request)
        if request.after is not None:
            request.after()

    def move(self, request: BlockRequest) -> None:
        """Move a request's bytes on the calling thread."""
        whole = request.nbytes // PAGE_BYTES * PAGE_BYTES
        if request.address % PAGE_BYTES:
            whole = 0
        elif request.write or request.whole_pages:
            whole = round_up(request.nbytes, PAGE_BYTES)
        if whole:
            view = view_of(request.address, whole)
            if request.write:
                self.write_pages(request.fd, view, request.offset)
            else:
                needed = min(whole, request.nbytes)
                self.read_pages(request.fd, view, request.offset, needed)
        rest = request.nbytes - whole
        if rest > 0:
            bounce = self._bounce
            padded = bounce.view[: round_up(rest, PAGE_BYTES)]
            if request.write:
                _memmove(bounce.address, request.address + whole, rest)
                self.write_pages(request.fd, padded, request.offset + whole)
            else:
                self.read_pages(request.fd, padded, request.offset + whole, rest)
                _memmove(request.address + whole, bounce.address, rest)


class Bounce(threading.local):
    """One page-aligned buffer a thread, for memory that direct I/O cannot take as it is."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, round_up(nbytes, PAGE_BYTES))
        self.view = memoryview(self.memory)
        self._anchor = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._anchor)


class _Run:
    """Requests on their way through a thread. See [Note: threads that die] in workers.py."""

    __slots__ = ("_backend", "_over", "_requests")

    def __init__(self, backend: ThreadedBackend, requests: Sequence[BlockRequest]) -> None:
        self._backend = backend
        self._requests = requests
        self._over = 0

    def __call__(self) -> None:
        requests, backend = self._requests, self._backend
        moved = len(requests) > 1 and backend.moved_together(requests)
        for request in requests:
            error: BaseException | None = None
            try:
                if not moved:  # what failed together may fail for one of them
                    backend.run(request)
            except Exception as caught:
                error = caught
            self._tell(error)

    def end(self, error: BaseException) -> None:
        """Tell those that are left how it ended: the thread did."""
        for request in self._requests[self._over :]:
            reason = error
            if not isinstance(error, Exception):
                # A SystemExit or KeyboardInterrupt that was meant for this thread must not be
                # raised again in one that waits for the bytes.
                reason = StorageError(
                    f"the thread that moved {request.nbytes} bytes at offset {request.offset} was "
                    f"ended by {type(error).__name__}"
                )
                reason.__cause__ = error
            self._tell(reason)

    def _tell(self, error: BaseException | None) -> None:
        request = self._requests[self._over]
        self._over += 1
        request.on_done(error)


def view_of(address: int, nbytes: int) -> memoryview:
    """Memory as the interface of system calls takes it."""
    return memoryview((ctypes.c_char * nbytes).from_address(address))
