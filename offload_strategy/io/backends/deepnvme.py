"""The deepnvme backend: DeepSpeed's asynchronous I/O (`aio_handle`).

[Note: DeepSpeed ignores results]
`aio_handle` does not check the results of its requests: a read or write that failed or was short
looks successful, and a failed read may leave anything in memory. So this backend is used with
`checksum: full` only. A block that is not verified after reading (of an external file, which has no
checksums, or of memory that changed while it was written) is read by a system call. A block whose
checksum differs is read again by a system call, which returns the bytes or the error that DeepSpeed
ignored.

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
from contextlib import closing, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from offload_strategy.errors import ConfigError, CorruptDataError
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.backends.protocol import BlockRequest
from offload_strategy.io.backends.thread_pool import run_within
from offload_strategy.units import PAGE_BYTES, MiB

#: Bytes of one request to the kernel.
_IO_BYTES = 1 * MiB
#: DeepSpeed compiles at first use, and waits forever for the lock file of an interrupted build.
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
    """`aio_handle` for direct I/O of bytes with checksums; otherwise as the posix backend."""

    max_adjacent = 1
    default_checksum = "full"

    def __init__(self, *, threads: int, block_size: int) -> None:
        with _loading:  # the first of several threads imports it, the others wait
            self._aio = _load()
        super().__init__(threads=threads, block_size=block_size)
        self._idle_handles: deque[_Handle] = deque()

    def run(self, request: BlockRequest) -> None:
        """Perform all of a request except `on_done`."""
        try:
            super().run(request)
        except CorruptDataError:
            if not request.verified:
                raise
            request.verified = False  # what follows is a system call
            super().run(request)

    def move_pages(self, request: BlockRequest, view: memoryview, offset: int, needed: int) -> None:
        """Move whole pages; errors of DeepSpeed's stay unknown until what was read is verified."""
        fd, asynchronous = request.fd, request.direct
        if asynchronous and not request.write:
            inside = offset + len(view) <= os.fstat(fd).st_size  # False on a block device
            asynchronous = inside and request.verified
        if not asynchronous:
            super().move_pages(request, view, offset, needed)
            return
        try:
            handle = self._idle_handles.pop()
        except IndexError:
            handle = _Handle(self._aio, self.block_size)
        try:
            handle.move(fd, view, offset, write=request.write)
        finally:
            self._idle_handles.append(handle)

    def close(self) -> None:
        """Finish what was submitted, end the threads and free the locked memory."""
        super().close()
        while self._idle_handles:
            self._idle_handles.pop().close()


class _Handle:
    """One `aio_handle` with page-locked memory, which it would else lock for each request."""

    def __init__(self, aio: Any, block_size: int) -> None:
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

    def move(self, fd: int, view: memoryview, offset: int, *, write: bool) -> None:
        """Write or read memory, with an unknown result."""
        memory = target = torch.frombuffer(view, dtype=torch.uint8)
        if not self._aio.is_pinned(target):
            memory = self._locked[: len(view)]
            if write:
                memory.copy_(target)
        call = self._aio.sync_pwrite if write else self._aio.sync_pread
        if call(memory, f"/proc/self/fd/{fd}", offset) < 0:
            raise OSError(errno.EIO, f"DeepSpeed's aio refuses to move bytes at offset {offset}")
        if memory is not target and not write:
            target.copy_(memory)

    def close(self) -> None:
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


_loading = threading.Lock()


@cache
def _load() -> Any:
    """Import DeepSpeed's code, which compiles it at the first use."""
    if (reason := unavailable_reason()) is not None:
        raise ConfigError(f"io.backend: deepnvme cannot run here: {reason}. Or use 'auto'.")

    def build() -> Any:
        from deepspeed.ops.op_builder import AsyncIOBuilder

        return AsyncIOBuilder().load(verbose=False)

    built = run_within(_BUILD_SECONDS, build, "deepnvme-build")
    if built is None:
        raise ConfigError(
            f"io.backend: deepnvme cannot run here: DeepSpeed's aio was not compiled within "
            f"{_BUILD_SECONDS:.0f} s. If no other process is compiling it, remove the file 'lock' "
            f"that an earlier build left in torch's extensions directory "
            f"(~/.cache/torch_extensions/*/async_io). Or use 'auto'."
        )
    try:
        aio = built.result()
    except BaseException as error:
        raise ConfigError(
            f"io.backend: deepnvme cannot run here: DeepSpeed's aio does not load: {error}. "
            f"It needs {_INSTALL}. Or use 'auto'."
        ) from error
    _write_first(aio)
    return aio


def _write_first(aio: Any) -> None:
    """Make DeepSpeed's first write on one thread.

    It calls Python from within `std::call_once`: a second thread that got there meanwhile would
    wait forever while it holds the interpreter lock.
    """
    with closing(_Handle(aio, PAGE_BYTES)) as handle:
        page = mmap.mmap(-1, PAGE_BYTES)
        # An error is fine, for instance if the file system does not support direct I/O.
        with tempfile.TemporaryFile() as file, suppress(OSError):
            handle.move(file.fileno(), memoryview(page), 0, write=True)
