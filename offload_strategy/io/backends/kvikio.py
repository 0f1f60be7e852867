"""The kvikio backend: GPUDirect Storage, between a file and device memory without a host copy.

Host memory moves as in the posix backend, because cuFile is no faster there.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import threading
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

from offload_strategy.errors import ConfigError
from offload_strategy.io.backends.posix import PosixBackend
from offload_strategy.io.backends.protocol import BlockRequest

_MEMORY_TYPE_ATTRIBUTE = 2  # cuda.h: CU_POINTER_ATTRIBUTE_MEMORY_TYPE
_DEVICE_MEMORY = 2  # cuda.h: CU_MEMORYTYPE_DEVICE


def unavailable_reason() -> str | None:
    """Why this backend cannot run here, or None if it can."""
    import torch

    if not torch.cuda.is_available():
        return "it needs an NVIDIA GPU that torch can use (torch.cuda.is_available() is False)"
    if find_spec("kvikio") is None:
        return "the package kvikio is not installed: pip install 'offload-strategy[kvikio]'"
    try:
        _cufile()
    except Exception as error:  # a library that does not load, a missing driver
        return f"kvikio does not work here: {error}"
    return None


class KvikioBackend(PosixBackend):
    """cuFile for device memory, `os.preadv` and `os.pwritev` for host memory."""

    max_adjacent = 1  # cuFile takes one piece of memory

    def __init__(self, *, threads: int, block_size: int) -> None:
        if (reason := unavailable_reason()) is not None:
            raise ConfigError(f"io.backend: kvikio cannot run here: {reason}. Use 'auto'.")
        super().__init__(threads=threads, block_size=block_size)
        kvikio = _cufile()
        self.device_memory = not kvikio.defaults.is_compat_mode_preferred()
        if self.device_memory:  # the host does not see the bytes
            self.default_checksum = "off"
        # kvikio moves the bytes on its own threads, and restarts them when their number changes.
        if kvikio.defaults.get("num_threads") < 2 * threads:
            kvikio.defaults.set("num_threads", 2 * threads)
        # Below it kvikio copies through the page cache, whose late write errors nobody learns of.
        kvikio.defaults.set("gds_threshold", 0)
        self._open = kvikio.CuFile
        self._files: dict[tuple[int, int, int], Any] = {}
        self._lock = threading.Lock()

    def move(self, request: BlockRequest) -> None:
        """Move a request's bytes, device memory through cuFile."""
        if not _is_device_memory(request.address):
            super().move(request)
            return
        file = self._file(request.fd)
        transfer = file.pwrite if request.write else file.pread
        # Device memory as the CUDA array interface describes it.
        whole = {"shape": (request.nbytes,), "strides": None, "data": (request.address, False)}
        memory = SimpleNamespace(__cuda_array_interface__={**whole, "typestr": "|u1", "version": 3})
        try:
            done = transfer(memory, request.nbytes, request.offset, task_size=self.block_size).get()
        except RuntimeError as error:  # kvikio's type for errors of cuFile
            raise OSError(errno.EIO, f"cuFile: {error}") from error
        if done < request.nbytes:
            text = f"cuFile moved {done} of {request.nbytes} bytes at offset {request.offset}"
            raise OSError(errno.EIO, text)

    def close(self) -> None:
        """Finish what was submitted, end the threads and close the files."""
        super().close()
        while self._files:
            self._files.popitem()[1].close()

    def _file(self, fd: int) -> Any:
        """Return the file behind a descriptor, registered with cuFile once."""
        from fcntl import F_GETFL, fcntl

        status = os.fstat(fd)
        # A closed descriptor's number is reused; an open file's inode is not.
        device = status.st_rdev if stat.S_ISBLK(status.st_mode) else status.st_dev
        key = (fd, device, status.st_ino)
        with self._lock:
            file = self._files.get(key)
            if file is None:
                writable = fcntl(fd, F_GETFL) & os.O_ACCMODE != os.O_RDONLY
                # The files of regions are unnamed; this path reaches them.
                file = self._open(f"/proc/self/fd/{fd}", "r+" if writable else "r")
                self._files[key] = file
            return file


def _is_device_memory(address: int) -> bool:
    """Ask CUDA about an address; for pageable host memory it returns an error."""
    kind = ctypes.c_uint()
    error = _libcuda().cuPointerGetAttribute(
        ctypes.byref(kind), ctypes.c_int(_MEMORY_TYPE_ATTRIBUTE), ctypes.c_uint64(address)
    )
    return error == 0 and kind.value == _DEVICE_MEMORY


def _libcuda() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _cufile() -> Any:
    import_module("kvikio.defaults")
    return import_module("kvikio")
