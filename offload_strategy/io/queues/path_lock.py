"""One process per path at a time: a lock that the kernel frees when its holder dies.

Several processes that read and write one disk at once get its bandwidth in sum, but each request
takes as many times longer as there are processes. Taking turns keeps the sum and gives each turn
the whole disk (MLP-Offload, section on concurrency control for the storage tiers).

[Note: why these two locks]
The turn is `flock` on the directory itself: nothing is created that could be left behind, and the
kernel lets go of it when the process dies. Who else uses the path is told by names of abstract
sockets, which the kernel lists and which vanish with their process, too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows: no turns there
    fcntl = None  # type: ignore[assignment]

#: How long an answer about other processes is good for, in seconds.
_FRESH_SECONDS = 0.5
#: Given to others between two turns: the kernel wakes all who wait, and this process, which is
#: running already, would win the race for the next turn every time.
_COURTESY_SECONDS = 0.0003
_SOCKET_TABLE = "/proc/net/unix"

_counter = itertools.count()
_open: weakref.WeakSet[PathLock] = weakref.WeakSet()


class PathLock:
    """This process's part in taking turns on a path.

    Args:
        path: directory or block device; processes that name the same one take turns.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        stat = os.fstat(self._fd)
        self._prefix = f"offload-strategy/{stat.st_dev}:{stat.st_rdev}:{stat.st_ino}/"
        self._pid = os.getpid()
        self._others = 0
        self._asked_at = -1.0
        self._released_at = 0.0
        self._presence = self._announce()
        # Taking and giving back are rare, and may come from different threads.
        self._lock = threading.Lock()
        self.works = self._try_lock()
        _open.add(self)

    def others(self) -> int:
        """How many other processes on this machine use the path (the answer is up to 0.5 s old)."""
        now = time.monotonic()
        if self.works and now - self._asked_at > _FRESH_SECONDS:
            self._asked_at = now
            self._others = self._count_others()
        return self._others

    def acquire(self) -> None:
        """Wait for the turn; ends when its holder gives it back or dies.

        Raises:
            OSError: the file system cannot lock, or this object was closed.
        """
        assert fcntl is not None
        pause = self._released_at + _COURTESY_SECONDS - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        """Give the turn back. Harmless without it, and after `close`."""
        assert fcntl is not None
        with self._lock:
            self._released_at = time.monotonic()
            if self._fd >= 0:
                fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Leave the circle of those who use the path. Idempotent."""
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        if self._presence is not None:
            self._presence.close()

    def _try_lock(self) -> bool:
        """Whether the file system locks directories (network file systems may not)."""
        if fcntl is None:
            return False
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True

    def _announce(self) -> socket.socket | None:
        if not os.path.exists(_SOCKET_TABLE):
            return None
        presence = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            presence.bind(f"\0{self._prefix}{self._pid}/{next(_counter)}")
        except OSError:  # no abstract names in this sandbox
            presence.close()
            return None
        return presence

    def _count_others(self) -> int:
        if self._presence is None:
            return max(0, int(os.environ.get("LOCAL_WORLD_SIZE") or 1) - 1)
        pids = set()
        with open(_SOCKET_TABLE, errors="replace") as table:
            for line in table:
                _, found, rest = line.partition("@" + self._prefix)
                if found:
                    pids.add(rest.partition("/")[0])
        pids.discard(str(self._pid))
        return len(pids)


def _forget_in_child() -> None:
    # A forked child shares the lock's file description: the lock would outlive its holder there.
    for turns in list(_open):
        fd, turns._fd = turns._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)
        if turns._presence is not None:
            turns._presence.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
