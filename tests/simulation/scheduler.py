"""Threads of which one runs at a time, picked at random where real ones may change, on a clock.

They are threads of the system, but each stops at every lock, sleep, start and join until the
scheduler picks it. The same random numbers give the same run.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from timeit import default_timer
from typing import Any

import pytest

from offload_strategy.torch_support.keyboard_interrupts import UninterruptedSection

#: Seconds that pass at each change of threads.
_TICK_SECONDS = 0.00005
#: If nothing sleeps or moves bytes and everybody waits for longer than this, a wake-up was lost.
_PATIENCE_SECONDS = 0.02
#: Changes of threads after which a run has hung.
_MOST_STEPS = 50_000


class Abandoned(BaseException):
    """Ends the threads of a simulation that has failed."""


class Strand:
    """A thread of the simulation; `lock` and `until` are what it waits for."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.lock: SimulatedLock | None = None
        self.until: float | None = None
        self.go = threading.Lock()
        self.go.acquire()
        self.ident = threading.get_ident()


class _Carrier(threading.Thread):
    """A thread of the system, which is used again: to start one takes long."""

    idle: list[_Carrier] = []  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__(name="simulated", daemon=True)
        self.strand = Strand("", -1)
        self.main: Callable[[], None] | None = None
        self.start()

    def run(self) -> None:
        self.strand.ident = threading.get_ident()
        while True:
            self.strand.go.acquire()
            assert self.main is not None
            self.main()


class SimulatedLock:
    __slots__ = ("_scheduler", "taken")

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.taken = False

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        self._scheduler.point()
        if not self.taken:
            self.taken = True
            return True
        return blocking and self._scheduler.wait_for(self, timeout)

    def release(self) -> None:
        if not self.taken:
            raise RuntimeError("release unlocked lock")
        self.taken = False
        self._scheduler.point()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class OrderedSet(dict[Any, None]):
    """A set of objects in the order in which they were added, not of their addresses."""

    def add(self, key: Any) -> None:
        self[key] = None

    def discard(self, key: Any) -> None:
        self.pop(key, None)


class SimulatedThread:
    def __init__(self, target: Callable[..., Any], name: str = "", **_: Any) -> None:
        self.target, self.name = target, name
        self.scheduler: Scheduler = Shim.scheduler
        self.alive = SimulatedLock(self.scheduler)
        self.scheduler.threads_made += 1
        self._hash = self.scheduler.threads_made

    def __hash__(self) -> int:
        return self._hash  # sets of threads are in the same order in each run

    def start(self) -> None:
        self.scheduler.start(self)

    def is_alive(self) -> bool:
        return self.alive.taken

    def join(self, timeout: float = -1) -> None:
        if self.alive.acquire(timeout=timeout):
            self.alive.release()


class SimulatedLocal:
    """A `threading.local`: carriers are used again, and a new thread has no values."""

    def __init__(self) -> None:
        vars(self)["_values"] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._values[Shim.scheduler.current.number, name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[Shim.scheduler.current.number, name] = value


class Scheduler:
    """Picks who runs: after up to `2 * mean` points of one thread, any that can run."""

    def __init__(self, random: Random, mean: int) -> None:
        self.random = random
        self.now = 1.0
        self.steps = 0
        #: Points after which Ctrl-C is pressed; 0 for never. Whether new threads are refused.
        self.interrupt_in = 0
        self.refuses_threads = False
        self._mean = mean
        self._left = 0
        self.threads_made = 0
        self.system: Any = None
        self.failure: str | None = None
        self._ending = False
        self._main = self.current = Strand("main", 0)
        self.strands = [self._main]
        self._threads: dict[Strand, SimulatedThread] = {}

    # ------------------------------------------------------------------ what threads do
    def sleep(self, seconds: float) -> None:
        self.current.until = self.now + seconds
        self._switch()

    def point(self) -> None:
        """Let another thread run, or Ctrl-C come, perhaps."""
        if self.interrupt_in and self.current is self._main:
            self.interrupt_in -= not UninterruptedSection._inside or self.interrupt_in > 1
            if not self.interrupt_in:
                raise KeyboardInterrupt
        self._left -= 1
        if self._left <= 0 or self.failure is not None:
            self._switch()

    def wait_for(self, lock: SimulatedLock, timeout: float) -> bool:
        me = self.current
        me.lock, me.until = lock, None if timeout < 0 else self.now + timeout
        self._switch()
        got = not lock.taken
        lock.taken = True
        return got

    def start(self, thread: SimulatedThread) -> None:
        if self.refuses_threads and self.random.randrange(2):
            raise RuntimeError("can't start new thread")
        carrier = _Carrier.idle.pop() if _Carrier.idle else _Carrier()
        strand = carrier.strand
        strand.name, strand.number = thread.name, hash(thread)
        strand.lock = strand.until = None

        def main() -> None:
            try:
                thread.target()
            except Abandoned:
                pass
            except BaseException:
                self._gives_up(f"{thread.name} raised {traceback.format_exc()}")
            thread.alive.taken = False
            self.strands.remove(strand)
            del self._threads[strand]
            carrier.main = None  # a world must not live until the carrier's next thread
            _Carrier.idle.append(carrier)
            following = self._main if self.failure is not None else self._pick()
            self.current = following
            following.go.release()

        carrier.main = main
        thread.alive.taken = True
        self._threads[strand] = thread
        self.strands.append(strand)
        self.point()

    def current_thread(self) -> Any:
        return self._threads.get(self.current) or threading.current_thread()

    def fail(self, message: str) -> None:
        """End the simulation: what it raises is not to be caught."""
        if self.failure is None:
            frames = sys._current_frames()
            stacks = (f"{s.name}: {_where(frames[s.ident])}" for s in self.strands)
            self.failure = "\n".join((message, *stacks))
        self._switch()

    def end(self) -> None:
        """End all threads of a simulation that has failed."""
        self._ending = True
        while len(self.strands) > 1:
            self._hand_over(self.strands[-1])

    # ------------------------------------------------------------------ who runs
    def _switch(self) -> None:
        me = self.current
        if self.failure is None and (chosen := self._pick()) is not me:
            self._hand_over(chosen)
        me.lock = me.until = None
        if self.failure is not None and (me is not self._main or not self._ending):
            raise Abandoned

    def _hand_over(self, chosen: Strand) -> None:
        me, self.current = self.current, chosen
        chosen.go.release()
        me.go.acquire()

    def _pick(self) -> Strand:
        self.steps += 1
        self.now += _TICK_SECONDS
        if self.steps > _MOST_STEPS:
            return self._gives_up("it goes on for ever")
        while True:
            ready = [s for s in self.strands if self._is_ready(s)]
            if ready:
                self._left = 2 * self._mean - self.random.randrange(2 * self._mean)
                return ready[self.random.randrange(len(ready)) if len(ready) > 1 else 0]
            until = min((s.until for s in self.strands if s.until is not None), default=None)
            if until is None:
                return self._gives_up("all threads wait for each other")
            if until - self.now > _PATIENCE_SECONDS and all(s.lock for s in self.strands):
                return self._gives_up("everybody waits and nothing moves: a wake-up was lost")
            self.now = until

    def _gives_up(self, message: str) -> Strand:
        with suppress(Abandoned):
            self.fail(message)
        return self._main

    def _is_ready(self, strand: Strand) -> bool:
        lock, until = strand.lock, strand.until
        if until is not None and until <= self.now:
            return True
        return until is None if lock is None else not lock.taken


def _where(frame: Any) -> str:
    """The calls of the package and of the simulation that a thread is in."""
    calls = [call for call in traceback.extract_stack(frame) if __file__ != call.filename]
    return " > ".join(f"{Path(c.filename).stem}.{c.name}:{c.lineno}" for c in calls[-10:])


class Shim:
    """Stands for the modules `threading` and `time` in the package."""

    scheduler: Any = None

    def __init__(self, original: Any, **replaced: Any) -> None:
        self._original = original
        vars(self).update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


_SHIMS: dict[int, Any] = {
    id(threading): Shim(
        threading,
        Lock=lambda: SimulatedLock(Shim.scheduler),
        Thread=SimulatedThread,
        local=SimulatedLocal,
        current_thread=lambda: Shim.scheduler.current_thread(),
    ),
    id(time): Shim(time, sleep=lambda seconds: Shim.scheduler.sleep(seconds)),
    id(default_timer): lambda: Shim.scheduler.now,
}


@contextmanager
def simulated_threads() -> Iterator[None]:
    """Within this, the package's locks, threads, sleeps and clock belong to `Shim.scheduler`."""
    modules = [m for key, m in sys.modules.items() if key.startswith("offload_strategy.")]
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name, value in list(vars(module).items()):
                if id(value) in _SHIMS:
                    patch.setattr(module, name, _SHIMS[id(value)])
        yield
