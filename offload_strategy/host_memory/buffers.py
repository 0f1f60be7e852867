"""One page-aligned host buffer, and how a tensor borrows it.

[Note: buffers and the life of tensors]
A loaded tensor *is* the buffer that the disk was read into: no copy. The buffer may be used again
only when the last alias of that tensor is gone, which only the storage knows. `torch.frombuffer`
keeps its exporter alive as long as the storage; the exporter here is a ctypes array over the
mapping, and a weak reference to that array tells when it died.

[Note: no Python code in finalizers]
What runs when a tensor or a ticket dies may run on a thread that holds a lock, or when Ctrl-C is
pressed, whose KeyboardInterrupt Python drops inside a finalizer. So nothing of ours runs there: the
callback of a weak reference is the `append` of a deque, which is looked through later.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch

from offload_strategy.errors import OffloadError
from offload_strategy.telemetry import get_logger
from offload_strategy.torch_support.accelerator import register_host_memory, unregister_host_memory
from offload_strategy.units import PAGE_BYTES, MiB, format_size, round_up

logger = get_logger(__name__)

#: Transparent huge pages pay from about this size on (and are only ever whole inside a mapping).
_HUGE_PAGE_BYTES = 2 * MiB

_live: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()
_parents_memory: list[mmap.mmap] = []


class Lent(NamedTuple):
    """A tensor, the object that dies with its storage, their bytes, and what takes them back."""

    tensor: torch.Tensor
    exporter: ctypes.Array[ctypes.c_char]
    nbytes: int
    take_back: Callable[[], None]


class HostBuffer:
    """Private anonymous memory of exactly `nbytes`, rounded up to the page.

    `pinned` registers it with the device if the system allows it, so that copies to and from the
    device are asynchronous. PyTorch's own pinned allocator rounds to the next power of two; this
    does not (MemAscend, section on exact-size pinned memory). Raises OffloadError without room.
    """

    __slots__ = ("__weakref__", "_memory", "_pid", "address", "nbytes", "pinned")

    def __init__(self, nbytes: int, *, pinned: bool = False) -> None:
        self.nbytes = max(PAGE_BYTES, round_up(nbytes, PAGE_BYTES))
        flags = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0)
        try:  # on Windows, which has no flags, an anonymous mapping of the paging file
            self._memory = mmap.mmap(-1, self.nbytes, **({"flags": flags} if flags else {}))
        except OSError as error:
            raise OffloadError(
                f"could not map {format_size(self.nbytes)} of host memory: {error.strerror}. Lower "
                f"memory.pinned, end other programs, or raise this process's limit (ulimit -v)."
            ) from error
        # Data-loader workers are forked; they have no use for these pages and must not copy them.
        names = ["MADV_DONTFORK"]
        if self.nbytes >= _HUGE_PAGE_BYTES:
            names.append("MADV_HUGEPAGE")
        for advice in [getattr(mmap, name) for name in names if hasattr(mmap, name)]:
            with contextlib.suppress(OSError):  # kernels built without it
                self._memory.madvise(advice)
        _live.add(self._memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.pinned = pinned and register_host_memory(self.address, self.nbytes)
        if pinned and not self.pinned:
            _warn_of_pageable_memory(self.nbytes)
        self._pid = os.getpid()

    def acquire(
        self, nbytes: int, begin: int = 0
    ) -> tuple[torch.Tensor, ctypes.Array[ctypes.c_char]]:
        """Return a flat uint8 tensor from `begin` on, and the exporter of its storage."""
        exporter = (ctypes.c_char * max(1, nbytes)).from_buffer(self._memory, begin)
        tensor = torch.frombuffer(exporter, dtype=torch.uint8)
        return tensor if nbytes else tensor[:0], exporter

    def give_back(self, begin: int, nbytes: int) -> None:
        """Return a part of the memory to the system, which fills it with zeros at its next use."""
        if os.getpid() == self._pid:  # in a forked child, something else may be there
            try:
                self._memory.madvise(mmap.MADV_DONTNEED, begin, nbytes)
            except OSError as error:  # such as EINVAL after mlockall
                _warn_of_memory_that_stays(error.strerror)

    def release(self) -> None:
        """Return the memory to the system. The buffer must not be lent. Idempotent."""
        if os.getpid() != self._pid:
            return  # a forked child: see `_keep_parents_memory`
        if self.pinned:
            unregister_host_memory(self.address)
            self.pinned = False
        # The exporter of the last loan may still be on its way out (its weak reference is told just
        # before it lets go of the mapping); then the mapping ends with it, moments later.
        with contextlib.suppress(BufferError):
            self._memory.close()

    def __del__(self) -> None:
        if getattr(self, "pinned", False) and os.getpid() == self._pid:
            unregister_host_memory(self.address)


def with_own_storage(part: torch.Tensor) -> torch.Tensor:
    """Return a part of a flat uint8 tensor on the host as a tensor whose storage is that part.

    Whatever saves a tensor saves its storage, with the bytes of others that are in it.
    """
    exporter = (ctypes.c_char * part.numel()).from_address(part.data_ptr())
    cast(Any, exporter).owner = part  # its memory lives as long
    return torch.frombuffer(exporter, dtype=torch.uint8)


@lru_cache(maxsize=1)
def _warn_of_pageable_memory(nbytes: int) -> None:
    logger.warning(
        f"host memory could not be pinned ({format_size(nbytes)}); copies from and to the device "
        f"are slower without. Lower memory.pinned, or raise the limit of locked memory (ulimit -l)."
    )


@lru_cache(maxsize=1)
def _warn_of_memory_that_stays(reason: str) -> None:
    logger.warning(
        f"the system did not take idle host memory back ({reason}), as if the process had locked "
        f"its memory (mlockall). Training may hold more memory than memory.pinned says."
    )


def _keep_parents_memory() -> None:
    # The parent's mappings do not exist in a forked child (MADV_DONTFORK). Unmapping them there
    # could hit whatever the child mapped at the same address since: never let them be collected.
    _parents_memory.extend(_live)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_parents_memory)
