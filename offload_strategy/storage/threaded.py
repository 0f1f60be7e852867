"""What backends on threads have in common: the threads, what comes before and after, alignment."""

from __future__ import annotations

import ctypes
import mmap
import threading
from abc import ABC, abstractmethod

from offload_strategy.errors import StorageError
from offload_strategy.storage.backend import BlockRequest
from offload_strategy.storage.workers import Workers
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

    def __init__(self, *, threads: int, block_size: int) -> None:
        self.depth = threads
        self.block_size = block_size
        # One pool for both directions: who submits no more than `depth` of each, or twice as many
        # small ones, finds a thread for a read even when every write is stuck.
        self._workers = Workers("ssd-offload-io", 4 * threads)
        self._bounce = Bounce(block_size)

    def submit(self, request: BlockRequest) -> None:
        """Begin a request; `on_done` is called on one of the backend's threads."""
        run = _Run(self, request)
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
            view = _view(request.address, whole)
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
    """One request on its way through a thread. See [Note: threads that die] in workers.py."""

    __slots__ = ("_backend", "_over", "_request")

    def __init__(self, backend: ThreadedBackend, request: BlockRequest) -> None:
        self._backend = backend
        self._request = request
        self._over = False

    def __call__(self) -> None:
        error: BaseException | None = None
        try:
            self._backend.run(self._request)
        except Exception as caught:
            error = caught
        self.end(error)

    def end(self, error: BaseException | None) -> None:
        """Tell how it ended; what comes later is too late."""
        if self._over:
            return
        self._over = True
        if error is not None and not isinstance(error, Exception):
            # A SystemExit or KeyboardInterrupt that was meant for this thread must not be raised
            # again in one that waits for the bytes.
            reason = error
            error = StorageError(
                f"the thread that moved {self._request.nbytes} bytes at offset "
                f"{self._request.offset} was ended by {type(reason).__name__}"
            )
            error.__cause__ = reason
        self._request.on_done(error)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address))
