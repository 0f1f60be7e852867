"""The seam at which the package calls the operating system: calls are counted, and one can fail.

Functions of `os`, `fcntl`, `mmap`, `socket` and `threading` are replaced. Only calls that come from
the package count, also those that it makes by way of `pathlib` and the like.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import fcntl
import functools
import mmap
import os
import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Self
from unittest import mock

_PACKAGE = "offload_strategy"
#: Modules that make calls on behalf of their callers.
_BETWEEN = {"contextlib", "genericpath", "os", "pathlib", "posixpath", "shutil", "tempfile"}
_BETWEEN |= {"threading", "mmap", "psutil", "psutil._common", "psutil._pslinux", __name__}

#: The kinds of operations, each with the functions that make it and the errors that it can answer;
#: the k-th of a kind answers the k-th error, cyclically.
_FUNCTIONS: dict[str, tuple[tuple[tuple[Any, str], ...], tuple[int, ...]]] = {
    "open": (((os, "open"),), (errno.EMFILE, errno.EIO)),
    "allocate": (((os, "posix_fallocate"),), (errno.ENOSPC, errno.EIO)),
    "truncate": (((os, "ftruncate"),), (errno.EIO,)),
    "write": (((os, "pwritev"), (os, "pwrite")), (errno.EIO, errno.ENOSPC)),
    "read": (((os, "preadv"), (os, "read")), (errno.EIO,)),
    "sync": (((os, "fsync"), (os, "fdatasync")), (errno.EIO,)),
    "rename": (((os, "replace"),), (errno.EIO,)),
    "unlink": (((os, "unlink"),), (errno.EIO,)),
    "status": (
        tuple((os, name) for name in ("stat", "fstat", "statvfs", "fstatvfs", "listdir")),
        (errno.EIO,),
    ),
    "mode": (((os, "fchmod"), (os, "fchown")), (errno.EPERM,)),
    "advise": (((os, "posix_fadvise"),), (errno.EIO,)),
    "close": (((os, "close"),), (errno.EIO,)),
    "flags": (((fcntl, "fcntl"),), (errno.EIO,)),
    "lock": (((fcntl, "flock"),), (errno.ENOLCK,)),
    "discard": (((fcntl, "ioctl"),), (errno.EIO,)),
    "announce": (((socket, "socket"), (builtins, "open")), (errno.EMFILE,)),
}
REGISTER = "register memory"
MAP, ADVISE_MEMORY, LOOK = "map memory", "advise memory", "measure memory"
THREAD = "start thread"
KINDS = (*_FUNCTIONS, MAP, ADVISE_MEMORY, REGISTER, LOOK, THREAD)
#: Where the package reads how large the process is: one operation, which opens, reads and closes.
_LOOKS = f"{_PACKAGE}.host_memory.memory_limits:"

#: Operations on files that fail together when the disk is dead; of these, those that need space.
DISK = frozenset(
    {"open", "allocate", "truncate", "write", "read", "sync", "rename", "unlink", "status"}
)
_SPACE = frozenset({"allocate", "truncate", "write"})


def error_of(kind: str, number: int) -> int:
    """The `errno` of the operation of a kind with this number, from 1."""
    if kind in (MAP, ADVISE_MEMORY, REGISTER):
        return errno.ENOMEM
    if kind in (THREAD, LOOK):
        return errno.EAGAIN if kind == THREAD else errno.EMFILE
    errors = _FUNCTIONS[kind][1]
    return errors[(number - 1) % len(errors)]


def fail_with(kind: str, number: int) -> frozenset[str]:
    """The kinds that fail from now on when an operation fails for good.

    A disk that answers EIO is dead; a full one can still be read; anything else fails alone.
    """
    if kind in DISK:
        return {errno.EIO: DISK, errno.ENOSPC: _SPACE}.get(error_of(kind, number), {kind}) | {kind}
    return frozenset({kind})


@dataclass
class Seam:
    """Counts operations, and fails one, or that and all that follow; a context manager.

    Args:
        kind: which kind of operation is to fail; empty to count only.
        number: which of its kind, from 1.
        for_good: whether those that follow fail as well; see `fail_with`.
    """

    kind: str = ""
    number: int = 0
    for_good: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    #: What failed first: the call, and the line of the package that made it.
    failed: str = ""
    #: The kinds of operations that failed.
    raised: set[str] = field(default_factory=set)
    #: Memory that was mapped and still is.
    maps: weakref.WeakSet[mmap.mmap] = field(default_factory=weakref.WeakSet)
    _lifted: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def lift(self) -> None:
        """Let everything succeed from now on; nothing is counted any more."""
        self._lifted = True

    def check(self, kind: str, name: str) -> None:
        """Count an operation; raises what the operating system would if it is to fail."""
        if self._lifted:
            return
        caller = _caller()
        if caller is None or (caller.startswith(_LOOKS) and name != "open"):
            return
        if caller.startswith(_LOOKS):
            kind = LOOK
        with self._lock:
            self.counts[kind] += 1
            is_it = kind == self.kind and self.counts[kind] == self.number
            follows = bool(self.failed) and self.for_good
            if is_it and not self.failed:
                self.failed = f"{name} in {caller}"
            elif not (follows and kind in fail_with(self.kind, self.number)):
                return
            self.raised.add(kind)
        if kind == THREAD:
            raise RuntimeError("can't start new thread")
        number = error_of(self.kind, self.number) if kind in DISK else error_of(kind, 1)
        raise OSError(number, os.strerror(number))

    def __enter__(self) -> Self:
        assert _functions, "operations pass a seam within `installed` only"
        _current.append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.remove(self)


#: The seam that is open, if any, and what was there before `installed`.
_current: list[Seam] = []
_functions: list[Any] = []


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Replace the functions that operations are made by; without a seam they do what they did."""
    with contextlib.ExitStack() as undo:
        for kind, (functions, _) in _FUNCTIONS.items():
            for module, name in functions:
                undo.enter_context(_replaced(module, name, _checked(getattr(module, name), kind)))
        start = "_start_joinable_thread" if sys.version_info >= (3, 13) else "_start_new_thread"
        checked = _checked(getattr(threading, start), THREAD)
        undo.enter_context(_replaced(threading, start, checked))
        undo.enter_context(_replaced(mmap, "mmap", _Mapping))
        undo.callback(_functions.clear)
        if (device := sys.modules.get("tests.simulated_accelerator.sim")) is not None:
            undo.enter_context(mock.patch.object(device, "host_register", _registers(device)))
        yield


def _registers(device: Any) -> Callable[[int, int], int]:
    """Pins memory for the simulated accelerator, which answers a number that is not 0 if not."""
    register = device.host_register

    def host_register(address: int, nbytes: int) -> int:
        try:
            if _current:
                _current[-1].check(REGISTER, "host_register")
        except OSError as error:
            return error.errno or 1
        return int(register(address, nbytes))

    return host_register


@contextlib.contextmanager
def _replaced(module: Any, name: str, new: Any) -> Iterator[None]:
    """Replace an attribute, also where a module of the package has imported it by name."""
    old = getattr(module, name)
    _functions.append(old)
    owners = [
        other
        for other_name, other in list(sys.modules.items())
        if other_name.startswith(_PACKAGE) and vars(other).get(name) is old
    ]
    with contextlib.ExitStack() as undo:
        for owner in (module, *owners):
            undo.enter_context(mock.patch.object(owner, name, new))
        yield


def _checked(call: Callable[..., Any], kind: str) -> Callable[..., Any]:
    name = call.__name__

    @functools.wraps(call)
    def checked(*args: Any, **options: Any) -> Any:
        if not _current:
            return call(*args, **options)
        if kind != "close":
            _current[-1].check(kind, name)
            return call(*args, **options)
        call(*args, **options)  # the descriptor is gone, whatever `close` answers
        _current[-1].check(kind, name)
        return None

    return checked


class _Mapping(mmap.mmap):
    """A mapping whose creation and advice are operations, too."""

    def __new__(cls, *args: Any, **options: Any) -> Self:
        if _current:
            _current[-1].check(MAP, "mmap")
        made = super().__new__(cls, *args, **options)
        if _current and _caller() is not None:
            _current[-1].maps.add(made)
        return made

    def madvise(self, *args: Any) -> None:
        if _current:
            _current[-1].check(ADVISE_MEMORY, "madvise")
        super().madvise(*args)


def _caller() -> str | None:
    """The line of the package that makes the present call, or None if another module makes it."""
    for frame in _frames():
        name = frame.f_globals.get("__name__", "")
        if name not in _BETWEEN:
            return f"{name}:{frame.f_lineno}" if name.startswith(_PACKAGE) else None
    return None


def _frames() -> Iterator[Any]:
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back  # type: ignore[assignment]
