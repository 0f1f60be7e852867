"""One move of bytes between host memory and an extent, and its life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Any

from offload_strategy.storage import Extent
from offload_strategy.telemetry import Direction


class Latch:
    """An event that is set once, and that Ctrl-C in a waiting thread cannot leave locked.

    `threading.Event` guards itself with a condition, whose `__enter__` is Python code: a
    KeyboardInterrupt may end it after it took the lock, and then `set` would wait for ever.
    """

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Let everybody go who waits, now or later. To be called once."""
        self._is_set = True
        self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, `timeout` seconds at most; returns whether it is."""
        deadline = time.monotonic() + timeout
        while not self._is_set:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            # In slices: a waiter that was interrupted may have kept the lock; the flag still tells.
            if self._lock.acquire(timeout=min(left, 0.5)):
                self._lock.release()
        return True

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set


class Priority(IntEnum):
    """Which queued block goes next; lower overtakes higher."""

    NEEDED_NOW = 0
    PREFETCH = 1
    WRITE_BACK = 2


class MoveState(Enum):
    """QUEUED -> RUNNING -> DONE | FAILED | CANCELLED; a queued move may be cancelled outright."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False, slots=True)
class Move:
    """Bytes on their way; the queue that runs it is its only writer.

    Args:
        client: who asked, for metrics.
        direction: read from, or written to, the path.
        extent: where on the path.
        address: where in host memory.
        nbytes: how many bytes.
        priority: of its blocks, while they are queued.
        keep_alive: what owns the memory; dropped when the move ends.
        before: called on the I/O side before the first block, for instance to wait for a device
            copy into the memory that is to be written.
        on_end: called once when the move has ended, on an I/O thread or on the thread that
            cancelled it. Must not raise.
    """

    client: str
    direction: Direction
    extent: Extent
    address: int
    nbytes: int
    priority: Priority
    keep_alive: Any = field(repr=False)
    on_end: Callable[[Move], None] = field(repr=False)
    before: Callable[[], None] | None = field(default=None, repr=False)
    state: MoveState = MoveState.QUEUED
    error: BaseException | None = None
    queued_at: float = field(default_factory=time.perf_counter)
    started_at: float = 0.0
    finished_at: float = 0.0
    next_block: int = 0
    blocks_under_way: int = 0
    ended: Latch = field(default_factory=Latch, repr=False)
