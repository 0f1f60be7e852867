"""The path lock: of several processes that share a path, one reads at a time.

[Note: the path lock is for reads]
Processes that read one disk at the same time get its bandwidth in sum, but each read takes as many
times longer as there are processes. With a lock each read has the whole disk (MLP-Offload, section
on concurrency control for the storage tiers). Nobody waits for a write, so writes gain nothing from
it; and a path has more bandwidth when it reads and writes at once.

[Note: flock and abstract sockets]
The lock is `flock` on the directory itself, which the kernel releases when the process dies. Who
else uses the path is known from abstract sockets, which vanish with their process, too.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from timeit import default_timer as perf_counter

from offload_strategy.config.directories import local_processes
from offload_strategy.io.backends.thread_pool import ThreadPool
from offload_strategy.telemetry import get_logger
from offload_strategy.units import MiB

with contextlib.suppress(ImportError):  # Windows, where no tier has a path
    import fcntl

logger = get_logger(__name__)

#: While a queue holds the lock, the moves that begin before this many bytes may be read.
BYTES_PER_HOLD = 64 * MiB
#: The number of other processes is looked up again after this many seconds.
_FRESH_SECONDS = 0.5
#: Pause before acquiring the lock again: the kernel wakes all waiters, and this process, which is
#: already running, would win every time.
_REACQUIRE_PAUSE_SECONDS = 0.0003
_SOCKET_TABLE = "/proc/net/unix"

_counter = itertools.count()
_open: weakref.WeakSet[PathLock] = weakref.WeakSet()


class PathLock:
    """A lock for the processes that use one directory or block device."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, os.O_RDONLY)
        self._presence: socket.socket | None = None
        self._pid = os.getpid()
        self._others = 0
        self._counted_at = -1.0
        self._released_at = 0.0
        # `release` and `close` are rare and may come from different threads.
        self._lock = threading.Lock()
        try:
            stat = os.fstat(self._fd)
            self._prefix = f"offload-strategy/{stat.st_dev}:{stat.st_rdev}:{stat.st_ino}/"
            self._presence = self._announce()
            self.works = self._try_lock()
        except BaseException:
            self.close()
            raise
        _open.add(self)

    def others(self) -> int:
        """How many other processes on this machine use the path (up to 0.5 s ago)."""
        now = perf_counter()
        if self.works and now - self._counted_at > _FRESH_SECONDS:
            self._counted_at = now
            with contextlib.suppress(OSError):  # no descriptor is left
                self._others = self._count_others()
        return self._others

    def acquire(self) -> None:
        """Wait for the lock; raise OSError if the file system cannot lock, or after `close`."""
        pause = self._released_at + _REACQUIRE_PAUSE_SECONDS - perf_counter()
        if pause > 0:
            time.sleep(pause)
        fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        """Release the lock. Harmless if it is not held, and after `close`."""
        with self._lock:
            self._released_at = perf_counter()
            try:
                if self._fd >= 0:
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
            except OSError:  # closing the file releases it, too; the path goes without from now on
                self.works, self._others = False, 0
                self._close_file()

    def close(self) -> None:
        """Release the lock and no longer count as a user of the path. Idempotent."""
        with self._lock:
            self._close_file()
        if self._presence is not None:
            self._presence.close()

    def _close_file(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # it is closed even so
                os.close(fd)

    def _try_lock(self) -> bool:
        """Whether the file system locks directories (network file systems may not)."""
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        except OSError:
            self._close_file()  # it may be held, and not be released in another way
            return False
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
            return local_processes() - 1
        with open(_SOCKET_TABLE, errors="replace") as table:
            names = (line.partition("@" + self._prefix)[2] for line in table)
            pids = {name.partition("/")[0] for name in names if name}
        return len(pids - {str(self._pid)})


def _close_in_child() -> None:
    # A forked child shares the lock's file description: the lock would outlive its holder there.
    for lock in list(_open):
        lock._lock = threading.Lock()  # a thread of the parent may have held it
        with contextlib.suppress(OSError):
            lock.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


class PathLockHolder:
    """One queue's use of a path lock, if it has one: not needed, waited for, or held.

    All methods but `close` are called under the queue's lock; `on_acquired` is called without it,
    on a thread of this object, and calls `acquired` under it.
    """

    def __init__(self, lock: PathLock | None, on_acquired: Callable[[], None]) -> None:
        self._lock = lock if lock is not None and lock.works else None
        self._on_acquired = on_acquired
        self._thread = ThreadPool("ssd-offload-path-lock", 1)
        self._waiting = False
        self._closed = False
        self.held = False
        #: How many bytes may begin to be read while the lock is held.
        self.bytes_left = 0

    def may_begin(self, *, first_block: bool) -> bool:
        """Whether a block may begin; begins to wait for the lock if it is needed.

        Only the first block of a move has to wait: a move that has begun is never interrupted.
        """
        if self.held:
            return self.bytes_left > 0 or not first_block
        if self._lock is None or not self._lock.others():
            return True
        if not self._waiting and not self._closed:
            try:
                self._thread.submit(self._acquire)
            except RuntimeError:  # out of threads: better at the same time than never
                return True
            self._waiting = True
        return False

    def acquired(self) -> None:
        """The lock is held from now on."""
        self._waiting = False
        self.held = True
        self.bytes_left = BYTES_PER_HOLD

    def release(self) -> None:
        """Release the lock if it is held; no read may be in flight."""
        if self._lock is not None and self.held:
            self.held = False
            self._lock.release()

    def end_threads(self) -> None:
        """End the thread, once it has the lock that it waits for; it starts again on demand."""
        self._thread.end_threads(timeout=5.0)

    def close(self) -> None:
        """End the thread; one that waits for another process ends when that releases the lock."""
        self._closed = True
        self._thread.close(timeout=5.0)
        self.release()

    def _acquire(self) -> None:
        assert self._lock is not None
        try:
            self._lock.acquire()
        except (OSError, ValueError) as error:  # ValueError: closed meanwhile
            if not self._closed:
                text = "%s: the path lock does not work there (%s); continuing without it"
                logger.warning(text, self._lock.path, error)
        self._on_acquired()
