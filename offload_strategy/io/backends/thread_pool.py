"""A few threads that come when there is work and leave when there is none.

[Note: threads that die]
A thread may be ended from outside (an exception set asynchronously) or from inside (a SystemExit,
no memory). Its job is then told so and a fresh thread takes its place; no job is lost. An
asynchronous exception arrives after any call, so between taking a job and remembering it there is
no call, and nothing here waits on a `Condition`: its `__enter__` may be ended after it took the
lock. Idle threads sleep on a lock of their own instead, their bell.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable

from offload_strategy.telemetry import get_logger

logger = get_logger(__name__)

#: A thread without work for this long ends: a forgotten `close()` leaves no thread behind.
IDLE_SECONDS = 2.0
#: A helper that has been away for this long is reported.
SILENT_SECONDS = 30.0


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
        self._jobs: deque[tuple[Callable[[], None], Callable[[BaseException], None] | None]]
        self._jobs = deque()
        self._bells: deque[threading.Lock] = deque()  # those of the threads that sleep
        self._threads: set[threading.Thread] = set()
        self._started = 0
        self._lock = threading.Lock()
        self._own = threading.local()
        self._closed = False
        # What a helper does, and since when: it cannot tell by itself that a path is silent.
        self._helped: tuple[str, float] | None = None
        self._told_at = 0.0
        self._pid = os.getpid()

    def submit(
        self, job: Callable[[], None], died: Callable[[BaseException], None] | None = None
    ) -> None:
        """Queue a job.

        The first that a job submits, as its last act, is taken by its own thread: to wake another
        one for it, only to fall asleep, would cost more than a small job.

        Args:
            job: runs on one of the threads. What it raises ends that thread.
            died: called on that thread with what ended it.

        Raises:
            RuntimeError: after `close`, or in a forked child, where the threads do not exist.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process cannot use its parent's offload engine")
        with self._lock:
            if self._closed:
                raise RuntimeError("the workers are closed")
            self._jobs.append((job, died))
            if getattr(self._own, "is_free_next", False):
                self._own.is_free_next = False
            elif self._bells:
                self._bells.pop().release()  # the last to sleep; the others may leave
            elif len(self._threads) < self._count:
                try:
                    self._start_thread()
                except BaseException as error:
                    # Out of threads, or the interpreter ends. Those that run will do; a job that
                    # is refused must not stay behind, as its owner counts it as failed.
                    if self._threads and isinstance(error, RuntimeError):
                        return
                    self._jobs.pop()
                    raise

    @property
    def not_begun(self) -> int:
        """Jobs that no thread has begun."""
        return len(self._jobs)

    def help(self, what: str) -> bool:
        """Run one queued job on the calling thread, which has nothing else to do.

        A thread that was woken for a job takes longer to begin than a small job takes.

        Args:
            what: for the message, if it takes long.

        Returns:
            False if nothing was queued.
        """
        with self._lock:
            if not self._jobs:
                return False
            self._helped = (what, time.monotonic())
            job, died = self._jobs[0]
            del self._jobs[0]
        try:
            job()
        except BaseException as error:
            if died is not None:
                died(error)
            raise
        finally:
            self._helped = None
        return True

    def close(self, timeout: float = 60.0) -> None:
        """Let queued jobs finish, end the threads and wait for them, `timeout` seconds at most."""
        if os.getpid() != self._pid:
            return
        deadline = time.monotonic() + timeout
        with self._lock:
            self._closed = True
            while self._bells:
                self._bells.popleft().release()
        while True:
            with self._lock:  # a thread that died may have left another in its place
                threads = self._threads - {threading.current_thread()}
            if not threads or time.monotonic() >= deadline:
                return
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _start_thread(self) -> None:
        """Start one more; the caller holds the lock."""
        name = f"{self._name}-{self._started}"
        thread = threading.Thread(target=self._main, name=name, daemon=True)
        thread.start()
        self._started += 1
        self._threads.add(thread)

    def _main(self) -> None:
        while True:
            try:
                self._serve()
                return
            except BaseException as error:
                logger.warning("a thread of %s ended: %r", self._name, error)
                if self._replaced():
                    return

    def _serve(self) -> None:
        """Run jobs until there are none for a while."""
        job = died = None
        bell = threading.Lock()
        bell.acquire()
        rested = False
        try:
            while True:
                with self._lock:
                    if self._jobs:
                        # No call between these two: see [Note: threads that die].
                        job, died = self._jobs[0]
                        del self._jobs[0]
                    elif (rested and self._helped is None) or self._closed:
                        self._threads.discard(threading.current_thread())
                        return
                    else:
                        self._bells.append(bell)
                if job is None:
                    rested = not bell.acquire(timeout=IDLE_SECONDS)
                    if rested:
                        self._watch_helper()
                        with self._lock:
                            if bell in self._bells:
                                self._bells.remove(bell)
                            else:  # it rang just now
                                bell.acquire(blocking=False)
                    continue
                self._own.is_free_next = True
                job()
                self._own.is_free_next = False
                rested = False
                job = died = None  # what they hold must not live until the next one comes
        except BaseException as error:
            with self._lock:
                if bell in self._bells:
                    self._bells.remove(bell)
            if died is not None:
                died(error)
            raise

    def _watch_helper(self) -> None:
        helped, now = self._helped, time.monotonic()
        if helped is None:
            return
        what, since = helped
        if now - max(since, self._told_at) > SILENT_SECONDS:
            self._told_at = now
            logger.warning(
                "waiting for %s for %.0f s; the path does not answer, training resumes when it "
                "does",
                what,
                now - since,
            )

    def _replaced(self) -> bool:
        """Whether this thread may end: if jobs wait for it, a fresh one takes its place."""
        with self._lock:
            me = threading.current_thread()
            self._threads.discard(me)
            try:
                if self._jobs:
                    self._start_thread()
            except RuntimeError:  # out of threads: then this one goes on
                self._threads.add(me)
                return False
            return True
