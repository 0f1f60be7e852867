"""A thread pool whose threads start when there is work and end when there is none.

[Note: threads that die]
A thread may be ended from outside (an exception set asynchronously) or from inside (a SystemExit,
no memory). Its job's owner is then told, and a new thread replaces it; no job is lost. An
asynchronous exception arrives after any call, so there is no call between taking a job and storing
it, and nothing here waits on a `Condition`: its `__enter__` may be ended after it took the lock.
Each idle thread sleeps on a lock of its own instead.
"""

from __future__ import annotations

import _thread
import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from timeit import default_timer as perf_counter
from typing import TypeVar

from offload_strategy.telemetry import get_logger

logger = get_logger(__name__)

#: A thread without work for this long ends: nothing runs while nothing moves, and a forgotten
#: `close()` leaves no thread running. To start one takes a tenth of a millisecond.
IDLE_SECONDS = 1.0
#: A warning is logged when a job on the calling thread (`run_queued`) takes longer than this.
SILENT_SECONDS = 30.0

_Job = Callable[[], None]
_Died = Callable[[BaseException], None] | None
_Result = TypeVar("_Result")


def run_within(seconds: float, call: Callable[[], _Result], name: str) -> Future[_Result] | None:
    """Call on a thread of its own, which may never come back: then return None after so long."""
    ended: Future[_Result] = Future()

    def run() -> None:
        try:
            ended.set_result(call())
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return ended if wait([ended], seconds).done else None


_this_thread = threading.local()


def run_off_pools(call: Callable[[], object]) -> None:
    """Call at once, or on another thread if this one is of a pool; for finalizers that wait.

    Garbage may be collected on any thread. One of a pool would wait for its own job, for ever, and
    until then no garbage would be collected any more.
    """
    if getattr(_this_thread, "is_of_pool", False):
        # Not a `threading.Thread`: whoever allocates here may hold the lock of that module.
        _thread.start_new_thread(call, ())
    else:
        call()


class ThreadPool:
    """Run callables on at most `count` daemon threads, first in, first out."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._jobs: deque[tuple[_Job, _Died]] = deque()
        #: One locked lock per sleeping thread; releasing it wakes the thread.
        self._sleeping: deque[threading.Lock] = deque()
        self._threads: set[threading.Thread] = set()
        #: Threads that take no more jobs, but may still be alive.
        self._ending: set[threading.Thread] = set()
        self._started = 0
        self._lock = threading.Lock()
        self._own = threading.local()
        self._closed = False
        self._may_idle = True
        # What a caller of `run_queued` runs and since when: it cannot report a silent path itself.
        self._caller_runs: tuple[str, float] | None = None
        self._warned_at = 0.0
        self._pid = os.getpid()

    def submit(self, job: _Job, died: _Died = None) -> None:
        """Queue a job; if it raises, its thread ends and calls `died` with the exception.

        The first job that a job submits, as its last act, is taken by its own thread: waking
        another one would cost more than a small job. Raises RuntimeError after `close`, or in a
        forked child, where the threads do not exist.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("a forked process cannot use its parent's offload engine")
        with self._lock:
            if self._closed:
                raise RuntimeError("the thread pool is closed")
            self._jobs.append((job, died))
            if getattr(self._own, "is_free_next", False):
                self._own.is_free_next = False
            elif self._sleeping:
                self._sleeping.pop().release()  # the last to sleep; the others may end
            elif len(self._threads) < self._count:
                try:
                    self._start_thread()
                except BaseException as error:
                    # Out of threads, or the interpreter exits. Running threads will do; a refused
                    # job must not stay queued, as its owner counts it as failed.
                    if self._threads and isinstance(error, RuntimeError):
                        return
                    self._jobs.pop()
                    raise

    @property
    def queued(self) -> int:
        """Jobs that no thread has begun."""
        return len(self._jobs)

    def run_queued(self, what: str) -> bool:
        """Run one queued job on the calling thread, which has nothing else to do; False if none is.

        To wake a thread for a small job takes longer than the job. A warning about it names `what`.
        """
        with self._lock:
            if not self._jobs:
                return False
            self._caller_runs = (what, perf_counter())
            job, died = self._jobs[0]
            del self._jobs[0]
        try:
            job()
        except BaseException as error:
            if died is not None:
                died(error)
            raise
        finally:
            self._caller_runs = None
        return True

    def end_threads(self, timeout: float = 60.0) -> None:
        """Finish what is queued, end the threads, and wait for that; later jobs start new ones."""
        if os.getpid() != self._pid:
            return
        deadline = perf_counter() + timeout
        with self._lock:
            self._may_idle = False
            while self._sleeping:
                self._sleeping.popleft().release()
        while True:
            with self._lock:  # a thread that died may have been replaced
                known = (self._threads | self._ending) - {threading.current_thread()}
            threads = [thread for thread in known if thread.is_alive()]
            if not threads or perf_counter() >= deadline:
                return
            for thread in threads:
                thread.join(max(0.0, deadline - perf_counter()))

    def close(self, timeout: float = 60.0) -> None:
        """End the threads, as `end_threads` does, for good."""
        self._closed = True
        self.end_threads(timeout)

    def _start_thread(self) -> None:
        """Start one more thread; the caller holds the lock."""
        name = f"{self._name}-{self._started}"
        thread = threading.Thread(target=self._main, name=name, daemon=True)
        thread.start()
        self._started += 1
        self._threads.add(thread)
        self._ending = {thread for thread in self._ending if thread.is_alive()}

    def _main(self) -> None:
        _this_thread.is_of_pool = True
        while True:
            try:
                self._run_jobs()
                return
            except BaseException as error:
                logger.warning("a thread of %s ended: %r", self._name, error)
                if self._may_end():
                    return

    def _run_jobs(self) -> None:
        """Run jobs until there have been none for a while."""
        job = died = None
        wake = threading.Lock()
        wake.acquire()
        timed_out = False
        try:
            while True:
                with self._lock:
                    if self._jobs:
                        # No call between these two: see [Note: threads that die].
                        job, died = self._jobs[0]
                        del self._jobs[0]
                    elif (timed_out and self._caller_runs is None) or not self._may_idle:
                        self._ends()
                        return
                    else:
                        self._sleeping.append(wake)
                if job is None:
                    timed_out = not wake.acquire(timeout=IDLE_SECONDS)
                    if timed_out:
                        self._warn_if_caller_waits()
                        with self._lock:
                            if wake in self._sleeping:
                                self._sleeping.remove(wake)
                            else:  # it was woken just now
                                wake.acquire(blocking=False)
                    continue
                self._own.is_free_next = True
                job()
                self._own.is_free_next = False
                timed_out = False
                job = died = None  # what they hold must not live until the next job comes
        except BaseException as error:
            with self._lock:
                if wake in self._sleeping:
                    self._sleeping.remove(wake)
            if died is not None:
                died(error)
            raise

    def _warn_if_caller_waits(self) -> None:
        now = perf_counter()
        what, since = self._caller_runs or ("", now)
        if now - max(since, self._warned_at) > SILENT_SECONDS:
            self._warned_at = now
            logger.warning(
                f"waiting for {what} for {now - since:.0f} s; the path does not answer, training "
                f"resumes when it does"
            )

    def _may_end(self) -> bool:
        """Whether this thread may end; a new one replaces it if jobs are queued."""
        with self._lock:
            self._ends()
            try:
                if self._jobs:
                    self._start_thread()
            except RuntimeError:  # out of threads: this one continues
                self._threads.add(threading.current_thread())
                return False
            return True

    def _ends(self) -> None:
        """Note that the calling thread takes no more jobs; it holds the lock."""
        self._threads.discard(threading.current_thread())
        self._ending.add(threading.current_thread())
