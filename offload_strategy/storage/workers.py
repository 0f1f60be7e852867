"""A few threads that come when there is work and leave when there is none."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

#: A thread without work for this long ends: a forgotten `close()` leaves no thread behind.
IDLE_SECONDS = 2.0


class Workers:
    """Run callables on at most `count` threads, first in, first out.

    Threads are daemons: an interpreter that exits does not wait for them, and the files that they
    write have no name and vanish with the process.

    Args:
        name: prefix of the threads' names.
        count: threads at most.
    """

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._jobs: deque[Callable[[], None]] = deque()
        self._idle = 0
        self._threads: set[threading.Thread] = set()
        self._condition = threading.Condition()
        self._closed = False
        self._pid = os.getpid()

    def submit(self, job: Callable[[], None]) -> None:
        """Queue a job; it must not raise.

        Raises:
            RuntimeError: after `close`, or in a forked child, where the threads do not exist.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process cannot use its parent's offload engine")
        with self._condition:
            if self._closed:
                raise RuntimeError("the workers are closed")
            self._jobs.append(job)
            if len(self._jobs) <= self._idle or len(self._threads) >= self._count:
                self._condition.notify()
            else:
                number = len(self._threads)
                thread = threading.Thread(
                    target=self._loop, name=f"{self._name}-{number}", daemon=True
                )
                try:
                    thread.start()
                except BaseException as error:
                    # Out of threads, or the interpreter ends. Those that run will do; a job that
                    # is refused must not stay behind, as its owner counts it as failed.
                    if self._threads and isinstance(error, RuntimeError):
                        return
                    self._jobs.pop()
                    raise
                self._threads.add(thread)

    def close(self, timeout: float = 60.0) -> None:
        """Let queued jobs finish, end the threads and wait for them, `timeout` seconds at most."""
        if os.getpid() != self._pid:
            return
        with self._condition:
            self._closed = True
            self._condition.notify_all()
            threads = list(self._threads)
        deadline = time.monotonic() + timeout
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _loop(self) -> None:
        while True:
            with self._condition:
                if not self._jobs and not self._closed:
                    self._idle += 1
                    self._condition.wait_for(lambda: self._jobs or self._closed, IDLE_SECONDS)
                    self._idle -= 1
                if not self._jobs:
                    self._threads.discard(threading.current_thread())
                    return
                job = self._jobs.popleft()
            job()
            del job  # what it holds must not live until the next one comes
