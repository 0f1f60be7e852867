"""Settings of glibc's allocator, from which tensors of the CPU get their memory.

[Note: what glibc costs training on the CPU]
It returns the end of its heap to the system whenever 64 MiB are free there, and the next step needs
them again: page faults that take up to a fifth of a step, in plain PyTorch, too. And for tensors,
which are aligned to 64 bytes, glibc before 2.39 takes blocks that are a little too large and keeps
the rests where they are not merged with their neighbours (its bug 30723): a freed tensor leaves a
gap that is a little too small for the next one of its size, and the heap grows to several times of
what is in use. The caches that keep the rests can only be turned off when a process starts.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import suppress

from offload_strategy.units import MiB

_VARIABLE, _NO_CACHES = "GLIBC_TUNABLES", "glibc.malloc.tcache_count=0:glibc.malloc.mxfast=0"
#: First version without such gaps.
_MERGES = (2, 39)
#: Numbers of settings in <malloc.h>, and their values: the second is what glibc raises it to.
_M_TRIM_THRESHOLD, _NEVER = -1, -1
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 32 * MiB
#: Words of variables by which somebody else has chosen.
_CHOSEN = ("trim_threshold", "mmap_threshold", "top_pad", "mmap_max")


def _version() -> tuple[int, ...] | None:
    """Return the version of this process's glibc, or None with another C library."""
    try:
        name, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
        return tuple(map(int, version.split("."))) if name == "glibc" else None
    except (AttributeError, ValueError, OSError):
        return None


def leaves_gaps() -> bool:
    """Whether freed tensors leave gaps in the heap of this process; see the note above."""
    version = _version()
    caches = "tcache_count=0" not in os.environ.get(_VARIABLE, "")
    return version is not None and version < _MERGES and caches


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step, until `freed_memory` returns it.

    Does nothing with another C library, or if the environment has settings of these.
    """
    words = f"{' '.join(os.environ)} {os.environ.get(_VARIABLE, '')}".lower()
    if _version() is None or any(word in words for word in _CHOSEN):
        return
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)


class _Usage(ctypes.Structure):
    """The result of `mallinfo2`."""

    _NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _NAMES.split())


class FreedMemory:
    """Memory of freed tensors that glibc keeps in its heap, and that is resident."""

    def __init__(self) -> None:
        self._usage: Callable[[], _Usage] | None = None
        # Of the bytes that are free, those that were returned to the system and not used since.
        self._returned_bytes = 0
        # Gaps hardly serve another request.
        if _version() is not None and not leaves_gaps():
            with suppress(OSError, AttributeError):  # glibc before 2.33
                self._usage = ctypes.CDLL(None).mallinfo2
                self._usage.restype = _Usage

    def nbytes(self) -> int:
        """Return how many bytes a request for memory finds there at least."""
        free = self._free_bytes()
        self._returned_bytes = min(self._returned_bytes, free)
        return free - self._returned_bytes

    def return_all(self) -> None:
        """Return it to the system; other C libraries keep what they do.

        Takes some milliseconds, and page faults when the memory is used again.
        """
        with suppress(OSError, AttributeError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)
            self._returned_bytes = self._free_bytes()

    def _free_bytes(self) -> int:
        return 0 if self._usage is None else int(self._usage().fordblks)


freed_memory = FreedMemory()


def launch_environment() -> dict[str, str]:
    """Return the variables with which a training process should start; the user's own come first.

    Empty where freed tensors leave no gaps.
    """
    return {_VARIABLE: _NO_CACHES} if leaves_gaps() and _VARIABLE not in os.environ else {}
