"""The posix backend: positioned I/O on threads, direct where the space was opened so.

Plain threads reach the disk's limit because `os.preadv` and `os.pwritev` release the interpreter
lock for the whole call; no compiled code is needed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading

from offload_strategy.storage.backend import BlockRequest
from offload_strategy.storage.workers import Workers
from offload_strategy.units import PAGE_BYTES, round_up

# A direct pointer type: foreign calls through it release the interpreter lock while copying.
_memmove = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)


class _Bounce(threading.local):
    """One page-aligned buffer a thread, for memory that direct I/O cannot take as it is."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, round_up(nbytes, PAGE_BYTES))
        self.view = memoryview(self.memory)
        self._anchor = ctypes.c_char.from_buffer(self.memory)
        self.address = ctypes.addressof(self._anchor)


class PosixBackend:
    """`os.preadv` and `os.pwritev` on a few threads that leave when idle.

    Blocks whose memory is page-aligned move without a copy; others pass through one small buffer
    per thread, so that a tensor of any alignment costs no second buffer of its size.

    Args:
        threads: threads at most; also the useful queue depth.
        block_size: bytes a request may carry at most, a multiple of the page size.
    """

    def __init__(self, *, threads: int, block_size: int) -> None:
        self.depth = threads
        self.block_size = block_size
        self._workers = Workers("ssd-offload-io", threads)
        self._bounce = _Bounce(block_size)

    def submit(self, request: BlockRequest) -> None:
        """Begin a request; `on_done` is called on one of the backend's threads."""
        self._workers.submit(lambda: self._run(request))

    def close(self) -> None:
        """Finish what was submitted and end the threads."""
        self._workers.close()

    def _run(self, request: BlockRequest) -> None:
        error: BaseException | None = None
        try:
            if request.before is not None:
                request.before()
            (self._write if request.write else self._read)(request)
        except BaseException as caught:
            error = caught
        request.on_done(error)

    def _write(self, request: BlockRequest) -> None:
        whole = request.nbytes // PAGE_BYTES * PAGE_BYTES
        if request.address % PAGE_BYTES:
            whole = 0
        if whole:
            _write_all(request.fd, _view(request.address, whole), request.offset)
        if whole < request.nbytes:
            rest = request.nbytes - whole
            bounce = self._bounce
            _memmove(bounce.address, request.address + whole, rest)
            padded = bounce.view[: round_up(rest, PAGE_BYTES)]
            _write_all(request.fd, padded, request.offset + whole)

    def _read(self, request: BlockRequest) -> None:
        whole = request.nbytes // PAGE_BYTES * PAGE_BYTES
        if request.address % PAGE_BYTES:
            whole = 0
        if whole:
            _read_all(request.fd, _view(request.address, whole), request.offset)
        if whole < request.nbytes:
            rest = request.nbytes - whole
            bounce = self._bounce
            _read_all(request.fd, bounce.view[: round_up(rest, PAGE_BYTES)], request.offset + whole)
            _memmove(request.address + whole, bounce.address, rest)


def _view(address: int, nbytes: int) -> memoryview:
    return memoryview((ctypes.c_char * nbytes).from_address(address))


def _write_all(fd: int, view: memoryview, offset: int) -> None:
    """Write every byte; short writes go on where they stopped."""
    while view:
        done = os.pwritev(fd, [view], offset)
        if done == 0:
            raise OSError(f"wrote nothing at offset {offset}, {len(view)} bytes left")
        view, offset = view[done:], offset + done


def _read_all(fd: int, view: memoryview, offset: int) -> None:
    """Read every byte; the end of the file before that is an error."""
    while view:
        done = os.preadv(fd, [view], offset)
        if done == 0:
            raise OSError(f"end of file at offset {offset}, {len(view)} bytes missing")
        view, offset = view[done:], offset + done
