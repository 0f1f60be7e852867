"""The deepnvme backend: DeepSpeed's asynchronous I/O (`aio_handle`), for those who have it tuned.

[Note: results that DeepSpeed does not look at]
`aio_handle` reaps the events of its requests without looking at their results: a read or write that
failed, or was short, looks like one that went well, and a failed read may leave anything in memory.
So the config wants `checksum: true` with this backend. A block that is not checked after reading
(of somebody else's file, which has no checksums) is read by a system call. So is one whose check
failed, a second time: that brings the bytes, or the error that DeepSpeed did not tell.

Some conditions end the process in an assertion of DeepSpeed's: a range beyond the end of the file,
a signal on its thread, no room for its events. They are looked for before.
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
#: DeepSpeed compiles its code at the first use; a build that was interrupted leaves a lock, for
#: which the next one waits for ever.
_BUILD_SECONDS = 1200.0

_INSTALL = (
    "pip install deepspeed ninja, and the system's packages for a C++ compiler and libaio "
    "(apt install g++ libaio-dev)"
)


def why_not() -> str | None:
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
    """`aio_handle` on files that were opened for direct I/O; the rest as the posix backend does.

    Only for bytes whose checksums are kept: see [Note: results that DeepSpeed does not look at].

    Raises:
        ConfigError: DeepSpeed, libaio or a compiler is missing, or the code cannot be compiled.
    """

    most_neighbours = 1

    def __init__(self, *, threads: int, block_size: int) -> None:
        self._aio = _load()
        super().__init__(threads=threads, block_size=block_size)
        self._way = _Way()
        self._handles: deque[_Handle] = deque()  # those that no thread uses

    def run(self, request: BlockRequest) -> None:
        """Do all of a request but `on_done`, on the calling thread."""
        self._way.checked = request.after is not None
        try:
            super().run(request)
        except CorruptDataError:
            if request.write or request.after is None:
                raise
            self._way.checked = False
            self.move(request)
            request.after()

    def write_pages(self, fd: int, view: memoryview, offset: int) -> None:
        """Write every byte, as far as one can know."""
        if is_buffered(fd):
            super().write_pages(fd, view, offset)
            return
        handle = self._borrow()
        try:
            handle.write(fd, view, offset)
        finally:
            self._handles.append(handle)

    def read_pages(self, fd: int, view: memoryview, offset: int, needed: int) -> None:
        """Read until `needed` bytes have come; the end of the file before that is an error."""
        inside = offset + len(view) <= os.fstat(fd).st_size  # never on a block device
        if not self._way.checked or not inside or is_buffered(fd):
            super().read_pages(fd, view, offset, needed)
            return
        handle = self._borrow()
        try:
            handle.read(fd, view, offset)
        finally:
            self._handles.append(handle)

    def close(self) -> None:
        """Finish what was submitted, end the threads, and give the locked memory back."""
        super().close()
        with suppress(IndexError):
            while True:
                self._handles.pop().release()

    def _borrow(self) -> _Handle:
        try:
            return self._handles.pop()
        except IndexError:
            return _Handle(self._aio, self.block_size)


class _Way(threading.local):
    """Whether what the thread reads now is checked afterwards."""

    checked = False


class _Handle:
    """One `aio_handle` and the locked memory without which it would lock some for each request."""

    def __init__(self, aio: Any, block_size: int) -> None:
        import torch

        depth = -(-block_size // _IO_BYTES)
        _check_room_for_events(4 * depth)
        # The thread that it starts inherits the mask: a signal would end the process there.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self._aio = aio.aio_handle(_IO_BYTES, depth, False, True, 1)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._locked = self._aio.new_cpu_locked_tensor(
            block_size, torch.empty(0, dtype=torch.uint8)
        )

    def write(self, fd: int, view: memoryview, offset: int) -> None:
        """Write memory; nobody knows whether it arrived."""
        import torch

        memory = torch.frombuffer(view, dtype=torch.uint8)
        if not self._aio.is_pinned(memory):
            memory = self._locked[: len(view)].copy_(memory)
        if self._aio.sync_pwrite(memory, f"/proc/self/fd/{fd}", offset) < 0:
            raise OSError(errno.EIO, f"DeepSpeed's aio refuses to write at offset {offset}")

    def read(self, fd: int, view: memoryview, offset: int) -> None:
        """Read into memory; nobody knows whether it arrived."""
        import torch

        target = torch.frombuffer(view, dtype=torch.uint8)
        memory = target if self._aio.is_pinned(target) else self._locked[: len(view)]
        if self._aio.sync_pread(memory, f"/proc/self/fd/{fd}", offset) < 0:
            raise OSError(errno.EIO, f"DeepSpeed's aio refuses to read at offset {offset}")
        if memory is not target:
            target.copy_(memory)

    def release(self) -> None:
        """Give the locked memory back."""
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
            f"taken). Raise fs.aio-max-nr (sysctl), or use io.backend: posix",
        )


_loaded: Any = None
_loading = threading.Lock()


def _load() -> Any:
    """Import, and at the first use compile, DeepSpeed's code."""
    global _loaded
    with _loading:
        if _loaded is None:
            reason = why_not()
            if reason is not None:
                raise ConfigError(f"io.backend: deepnvme cannot run here: {reason}. Or use 'auto'.")
            _loaded = _build()
            _write_once(_loaded)
        return _loaded


def _write_once(aio: Any) -> None:
    """Make DeepSpeed's first write while no other thread makes one.

    In the first it calls Python from within `std::call_once`. A second thread that came to the same
    place meanwhile would wait there with the interpreter lock in its hands, for ever.
    """
    handle = _Handle(aio, PAGE_BYTES)
    try:
        page = mmap.mmap(-1, PAGE_BYTES)
        # The file system may not take direct I/O: that is as good.
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
            f"that an earlier one left in torch's folder of extensions "
            f"(~/.cache/torch_extensions/*/async_io). Or use 'auto'."
        )
    return outcome[0]
