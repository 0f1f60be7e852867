"""Settings of glibc's allocator, from which tensors of the CPU get their memory.

[Note: what glibc costs training on the CPU]
It returns the end of its heap to the system whenever 64 MiB are free there, and the next step needs
them again: page faults that take up to a fifth of a step, in plain PyTorch, too. And for tensors,
which are aligned to 64 bytes, glibc before 2.39 takes blocks that are a little too large and keeps
the rests where they are not merged with their neighbours (its bug 30723): a freed tensor leaves a
gap that is a little too small for the next one of its size, and the heap grows to several times of
what is in use. The caches that keep the rests are turned off by `GLIBC_TUNABLES` when a process
starts. Later there is no function for it.

[Note: caches of a running process]
A thread has a cache for each size of small blocks. How many is a variable, with which the size is
compared before a cache is used, so a process may set it to zero at any time: blocks that are in the
caches stay there until their thread ends. (The number of blocks in each, which the tunable sets,
must not be lowered: glibc ends a process whose caches have more.) The variable has no name in the
library. `mallopt` shows where its neighbours are: a value that was set is found once in the
library's data, and behind it this variable before three others with glibc's defaults. If anything
is otherwise (another build, settings of the user), all stays as it is.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from offload_strategy.units import MiB

_VARIABLE = "GLIBC_TUNABLES"
#: First version with such caches, and first without such gaps.
_CACHES, _MERGES = (2, 26), (2, 39)
#: Numbers of settings in <malloc.h>, and their values: the second is what glibc raises it to.
_M_TRIM_THRESHOLD, _NEVER = -1, -1
_M_MMAP_THRESHOLD, _MAPPED_BYTES = -3, 32 * MiB
_M_MXFAST, _M_ARENA_TEST = 1, -7
#: A value that nobody else has, and the setting's default. In as many words behind it: numbers of
#: caches, their largest blocks, blocks in each, and blocks that are looked at without a limit.
_MARK, _ARENA_TEST, _WORDS_BEHIND, _WORD = 0x6F66666C, 8, 24, 8
_CACHE_VALUES = (64, 1032, 7, 0)
#: Words of variables by which somebody else has chosen.
_CHOSEN = ("trim_threshold", "mmap_threshold", "top_pad", "mmap_max")
_CHOSEN_CACHES = ("tcache", "mxfast", "arena_test")


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
    caches = "tcache_count=0" not in os.environ.get(_VARIABLE, "") and not _Caches.are_off
    return version is not None and version < _MERGES and caches


def _chosen(words: tuple[str, ...]) -> bool:
    """Whether the environment has a setting with one of these words."""
    environment = f"{' '.join(os.environ)} {os.environ.get(_VARIABLE, '')}".lower()
    return any(word in environment for word in words)


class _Caches:
    """glibc's caches of small freed blocks; see [Note: caches of a running process]."""

    are_off = False
    # What one thread has marked must not be the value that another one restores.
    _lock = threading.Lock()

    @classmethod
    def turn_off(cls) -> None:
        """Turn them off in this process, if they are found where they should be."""
        version = _version() or ()
        if cls.are_off or not _CACHES <= version < _MERGES or _chosen(_CHOSEN_CACHES):
            return
        with cls._lock, suppress(OSError, AttributeError, ValueError):
            library = ctypes.CDLL(None)
            number = cls._find_number(library)
            if number is not None:
                number.value = 0
                library.mallopt(_M_MXFAST, 0)
                cls.are_off = True

    @staticmethod
    def _find_number(library: ctypes.CDLL) -> ctypes.c_uint64 | None:
        """Return the variable with the number of caches, or None if in doubt."""
        if ctypes.sizeof(ctypes.c_void_p) != _WORD:
            return None
        begins, sizes = _writable_data(ctypes.cast(library.mallopt, ctypes.c_void_p).value or 0)

        def read() -> list[tuple[int, ...]]:
            data = map(ctypes.string_at, begins, sizes)
            return [struct.unpack(f"={len(each) // _WORD}Q", each) for each in data]

        before = read()
        library.mallopt(_M_ARENA_TEST, _MARK)
        marked = read()
        places = [
            (n, at) for n, words in enumerate(marked) for at, w in enumerate(words) if w == _MARK
        ]
        if len(places) != 1:
            library.mallopt(_M_ARENA_TEST, _ARENA_TEST)
            return None
        mapping, at = places[0]
        library.mallopt(_M_ARENA_TEST, before[mapping][at])
        words = marked[mapping]
        behind = range(at + 1, at + _WORDS_BEHIND)
        found = [first for first in behind if words[first : first + 4] == _CACHE_VALUES]
        if len(found) != 1 or read()[mapping][at] != before[mapping][at]:
            return None
        return ctypes.c_uint64.from_address(begins[mapping] + found[0] * _WORD)


def _writable_data(address: int) -> tuple[list[int], list[int]]:
    """Return begins and bytes of the writable data of the library that has code at an address."""
    mapped = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        ends, mode, _, _, _, *path = line.split(maxsplit=5)
        begin, end = (int(each, 16) for each in ends.split("-"))
        mapped.append((begin, end, mode, path))
    paths = [path for begin, end, _, path in mapped if begin <= address < end and path]
    data = [
        (begin, end - begin)
        for begin, end, mode, path in mapped
        if path in paths and mode[:2] == "rw"
    ]
    return [begin for begin, _ in data], [size for _, size in data]


def reuse_freed_memory() -> None:
    """Let freed tensors leave no gaps in the heap of this process, and stay there for later ones.

    For training that offloads. Small requests for memory take some nanoseconds more. Settings of
    the environment come first.
    """
    if leaves_gaps():
        _Caches.turn_off()
    if not leaves_gaps():
        keep_freed_memory()


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next step, until `freed_memory` returns it.

    Does nothing with another C library, or if the environment has settings of these.
    """
    if _version() is None or _chosen(_CHOSEN):
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
        if _version() is not None:
            with suppress(OSError, AttributeError):  # glibc before 2.33
                self._usage = ctypes.CDLL(None).mallinfo2
                self._usage.restype = _Usage

    @property
    def is_known(self) -> bool:
        """Whether the C library tells how much it is, and requests find it: gaps serve few."""
        return self._usage is not None and not leaves_gaps()

    def nbytes(self) -> int:
        """Return how many bytes a request for memory finds there, as far as is known."""
        return self.note_reuse() - self._returned_bytes if self.is_known else 0

    def note_reuse(self) -> int:
        """Note how much of what was returned is in use again; return all bytes that are free."""
        free = self._free_bytes()
        self._returned_bytes = min(self._returned_bytes, free)
        return free

    def in_use_bytes(self) -> int:
        """Return how many bytes of memory are in use that the C library has given."""
        usage = self._usage() if self._usage is not None else _Usage()
        return int(usage.uordblks + usage.hblkhd)

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
