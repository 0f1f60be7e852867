"""The deepnvme backend: DeepSpeed's asynchronous I/O (`aio_handle`).

[Note: DeepSpeed ignores results]
`aio_handle` does not check the results of its requests: a read or write that failed or was short
looks successful, and a failed read may leave anything in memory. So the config requires
`checksum: true` with this backend. A block that is not verified after reading (of an external file,
which has no checksums) is read by a system call. A block whose checksum differs is read again by a
system call, which returns the bytes or the error that DeepSpeed ignored.

Some conditions end the process in an assertion of DeepSpeed: a range beyond the end of the file, a
signal on its thread, too many asynchronous requests in the system. They are checked beforehand.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections import deque
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from offload_strategy.errors import ConfigError, CorruptDataError
from offload_strategy.io.backends.posix import PosixBackend, is_buffered
from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.units import PAGE_BYTES, MiB

#: Bytes of one request to the kernel.
_IO_BYTES = 1 * MiB
#: DeepSpeed compiles its code at the first use. An interrupted build leaves a lock file, and the
#: next build would wait for it forever.
_BUILD_SECONDS = 1200.0

_INSTALL = (
    "pip install deepspeed ninja, and the system's packages for a C++ compiler and libaio "
    "(apt install g++ libaio-dev)"
)


def unavailable_reason() -> str | None:
    """Why this backend cannot run here, or None if it can; compiles nothing."""
    if find_spec("deepspeed") is None:
        return f"the package deepspeed is not installed: {_INSTALL}"
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        return f"there is no C++ compiler: {_INSTALL}"
    if shutil.which("ninja") is None and find_spec("ninja") is None:
        return f"ninja is not installed: {_INSTALL}"
    try:
        subprocess.run(
            [compiler, "-x", "c++", "-fsyntax-only", "-include", "libaio.h", os.devnull],
            check=True,
            capture_output=True,
            timeout=60,
        )
    except (OSError, subprocess.SubprocessError):
        return f"the headers of libaio are not installed: {_INSTALL}"
    return None


class DeepNvmeBackend(PosixBackend):
    """`aio_handle` for files opened for direct I/O; otherwise as the posix backend.

    Only for bytes with checksums; see [Note: DeepSpeed ignores results].
    """

    max_adjacent = 1

    def __init__(self, *, threads: int, block_size: int) -> None:
        self._aio = _load()
        super().__init__(threads=threads, block_size=block_size)
        self._current = _CurrentRequest()
        self._idle_handles: deque[_Handle] = deque()

    def run(self, request: BlockRequest) -> None:
        """Perform all of a request except `on_done`."""
        self._current.verified = request.after is not None
        try:
            super().run(request)
        except CorruptDataError:
            if request.write or request.after is None:
                raise
            self._current.verified = False
            self.move(request)
            request.after()

    def write_pages(self, fd: int, view: memoryview, offset: int) -> None:
        """Write whole pages; an error of DeepSpeed's stays unknown until they are read."""
        if is_buffered(fd):
            super().write_pages(fd, view, offset)
            return
        handle = self._borrow()
        try:
            handle.write(fd, view, offset)
        finally:
            self._idle_handles.append(handle)

    def read_pages(self, fd: int, view: memoryview, offset: int, needed: int) -> None:
        """Read into page-aligned memory; the file may end after `needed` bytes."""
        inside = offset + len(view) <= os.fstat(fd).st_size  # False on a block device
        if not self._current.verified or not inside or is_buffered(fd):
            super().read_pages(fd, view, offset, needed)
            return
        handle = self._borrow()
        try:
            handle.read(fd, view, offset)
        finally:
            self._idle_handles.append(handle)

    def close(self) -> None:
        """Finish what was submitted, end the threads and free the locked memory."""
        super().close()
        with suppress(IndexError):
            while True:
                self._idle_handles.pop().release()

    def _borrow(self) -> _Handle:
        try:
            return self._idle_handles.pop()
        except IndexError:
            return _Handle(self._aio, self.block_size)


class _CurrentRequest(threading.local):
    """Whether the request that a thread runs is verified afterwards."""

    verified = False


class _Handle:
    """One `aio_handle` with page-locked memory, which it would else lock for each request."""

    def __init__(self, aio: Any, block_size: int) -> None:
        import torch

        depth = -(-block_size // _IO_BYTES)
        _check_room_for_events(4 * depth)
        # Its thread inherits the mask; a signal on that thread would end the process.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._aio = aio.aio_handle(_IO_BYTES, depth, False, True, 1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._locked = self._aio.new_cpu_locked_tensor(
            block_size, torch.empty(0, dtype=torch.uint8)
        )

    def write(self, fd: int, view: memoryview, offset: int) -> None:
        """Write memory, with an unknown result."""
        import torch

        memory = torch.frombuffer(view, dtype=torch.uint8)
        if not self._aio.is_pinned(memory):
            memory = self._locked[: len(view)].copy_(memory)
        if self._aio.sync_pwrite(memory, f"/proc/self/fd/{fd}", offset) < 0:
            raise OSError(errno.EIO, f"DeepSpeed's aio refuses to write at offset {offset}")

    def read(self, fd: int, view: memoryview, offset: int) -> None:
        """Read into memory, with an unknown result."""
        import torch

        target = torch.frombuffer(view, dtype=torch.uint8)
        memory = target if self._aio.is_pinned(target) else self._locked[: len(view)]
        if self._aio.sync_pread(memory, f"/proc/self/fd/{fd}", offset) < 0:
            raise OSError(errno.EIO, f"DeepSpeed's aio refuses to read at offset {offset}")
        if memory is not target:
            target.copy_(memory)

    def release(self) -> None:
        """Free the locked memory."""
        self._aio.free_cpu_locked_tensor(self._locked)


def _check_room_for_events(wanted: int) -> None:
    try:
        used = int(Path("/proc/sys/fs/aio-nr").read_text())
        most = int(Path("/proc/sys/fs/aio-max-nr").read_text())
    except (OSError, ValueError):
        return
    if used + wanted > most:
        raise OSError(
            errno.EAGAIN,
            f"the system has no room for {wanted} more asynchronous requests ({used} of {most} are "
            f"in use). Raise fs.aio-max-nr (sysctl), or use io.backend: posix",
        )


_loaded: Any = None
_loading = threading.Lock()


def _load() -> Any:
    """Import DeepSpeed's code, which compiles it at the first use."""
    global _loaded
    with _loading:
        if _loaded is None:
            reason = unavailable_reason()
            if reason is not None:
                raise ConfigError(f"io.backend: deepnvme cannot run here: {reason}. Or use 'auto'.")
            _loaded = _build()
            _write_first(_loaded)
        return _loaded


def _write_first(aio: Any) -> None:
    """Make DeepSpeed's first write on one thread.

    The first write calls Python from within `std::call_once`. A second thread that got there
    meanwhile would wait forever while it holds the interpreter lock.
    """
    handle = _Handle(aio, PAGE_BYTES)
    try:
        page = mmap.mmap(-1, PAGE_BYTES)
        # An error is fine, for instance if the file system does not support direct I/O.
        with tempfile.TemporaryFile() as file, suppress(OSError):
            handle.write(file.fileno(), memoryview(page), 0)
    finally:
        handle.release()


def _build() -> Any:
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def build() -> None:
        try:
            from deepspeed.ops.op_builder import AsyncIOBuilder

            outcome.append(AsyncIOBuilder().load(verbose=False))
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=build, name="deepnvme-build", daemon=True)
    thread.start()
    thread.join(_BUILD_SECONDS)
    if failure:
        raise ConfigError(
            f"io.backend: deepnvme cannot run here: DeepSpeed's aio does not load: {failure[0]}. "
            f"It needs {_INSTALL}. Or use 'auto'."
        ) from failure[0]
    if not outcome:
        raise ConfigError(
            f"io.backend: deepnvme cannot run here: DeepSpeed's aio was not compiled within "
            f"{_BUILD_SECONDS:.0f} s. If no other process is compiling it, remove the file 'lock' "
            f"that an earlier build left in torch's extensions directory "
            f"(~/.cache/torch_extensions/*/async_io). Or use 'auto'."
        )
    return outcome[0]
