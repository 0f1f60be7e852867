"""Moves: the transfer of a ticket's bytes between host memory and the paths that hold them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from timeit import default_timer as perf_counter
from typing import Any

from offload_strategy.io.queues.checksums import Digests
from offload_strategy.io.queues.encryption import Tags
from offload_strategy.io.queues.path_queue import SMALL_BYTES, PathQueue
from offload_strategy.io.queues.request_queue import MoveState, Priority, StripeMove
from offload_strategy.io.regions.region import Extent
from offload_strategy.telemetry import Direction
from offload_strategy.torch_support.keyboard_interrupts import UninterruptedSection

#: Who waits for a small move polls so long first: to sleep and be woken costs as much as a read.
_POLL_SECONDS = 0.0004


class Latch:
    """An event that is set once, and that Ctrl-C in a waiting thread cannot leave locked.

    That of `threading` has a condition: see [Note: threads that die] in thread_pool.py.
    """

    __slots__ = ("_is_set", "_lock")

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake all who wait, now or later. To be called once."""
        self._is_set = True
        self._lock.release()

    def wait(self, timeout: float) -> bool:
        """Wait until it is set, `timeout` seconds at most; returns whether it is."""
        deadline = perf_counter() + timeout
        while not self._is_set:
            left = deadline - perf_counter()
            if left <= 0:
                return False
            # In slices: an interrupted waiter may have kept the lock, but the flag is still seen.
            if self._lock.acquire(timeout=min(left, 0.5)):
                self._lock.release()
        return True

    def is_set(self) -> bool:
        """Whether it is set."""
        return self._is_set


@dataclass(eq=False, slots=True)
class Stripe:
    """The part of a ticket from `begin` on that one path has; `digests`, if it is verified."""

    queue: PathQueue
    extent: Extent
    begin: int
    nbytes: int
    digests: Digests | Tags | None = None


class Move:
    """A transfer between memory and the stripes of one or several paths, none of them empty.

    `keep_alive` owns the memory. `on_end` is called once, on an I/O thread or on the thread that
    cancelled it, and must not raise. With `one_block_at_a_time`, that is so while nobody waits for
    it and few others are queued: each thread that moves bytes takes a core from a host that
    computes. For `is_buffer` see `BlockRequest`.
    """

    def __init__(
        self,
        *,
        client: str,
        direction: Direction,
        stripes: Sequence[Stripe],
        address: int,
        nbytes: int,
        priority: Priority,
        keep_alive: Any,
        on_end: Callable[[Move], None],
        one_block_at_a_time: bool = False,
        is_buffer: bool = False,
    ) -> None:
        self.direction = direction
        self.nbytes = nbytes
        self.keep_alive = keep_alive
        self.on_end = on_end
        self.queued_at = perf_counter()
        self.finished_at = 0.0
        self.error: BaseException | None = None
        self.ended = Latch()
        hints = (one_block_at_a_time, is_buffer)
        common = (client, direction, priority, self._part_ended, self.queued_at, *hints)
        self._parts = [
            (s.queue, StripeMove(s.extent.offset, s.nbytes, address + s.begin, s.digests, *common))
            for s in stripes
        ]
        self._parts_left = len(self._parts)
        #: How it ended.
        self.state: MoveState | None = None
        self._lock = threading.Lock()

    def submit(self) -> None:
        """Queue it on all of its paths; returns at once."""
        with UninterruptedSection():
            for queue, part in self._parts:
                queue.submit(part)

    def run_queued(self) -> None:
        """Run queued blocks on the calling thread, which is about to wait for the move."""
        while not self.ended.is_set() and any(queue.run_queued() for queue, _ in self._parts):
            pass
        deadline = perf_counter() + (_POLL_SECONDS if self.nbytes <= SMALL_BYTES else 0.0)
        while not self.ended.is_set() and perf_counter() < deadline:
            time.sleep(0)  # lets other threads run

    def raise_priority(self) -> None:
        """Let its queued blocks, which are needed now, overtake others."""
        for queue, part in self._parts:
            queue.raise_priority(part)

    def cancel(self) -> None:
        """Cancel it: blocks in flight finish, the others never start. `on_end` is called."""
        with UninterruptedSection():
            for queue, part in self._parts:
                queue.cancel(part)

    def unfinished_paths(self) -> str:
        """The paths that it still waits for."""
        return " and ".join(str(queue.path) for queue, part in self._parts if not part.is_over)

    def _part_ended(self, part: StripeMove) -> None:
        if part.error is not None and self.direction is Direction.WRITE:
            # Nobody waits for it here, and it may have come up on the thread that trains, whose
            # frames have tensors.
            part.error.__traceback__ = None
        with self._lock:
            self._parts_left -= 1
            last = self._parts_left == 0
            failed_first = part.state is MoveState.FAILED and self.error is None
            if failed_first:
                self.error = part.error
        if last:
            self._end()
        elif failed_first:
            self.cancel()  # the other parts are of no use alone

    def _end(self) -> None:
        if self.error is not None:
            self.state = MoveState.FAILED
        elif any(part.state is MoveState.CANCELLED for _, part in self._parts):
            self.state = MoveState.CANCELLED
        else:
            self.state = MoveState.DONE
        self.finished_at = perf_counter()
        on_end = self.on_end
        # Parts and move refer to each other: what it held must not wait for a garbage collection.
        self.keep_alive = None
        self.on_end = lambda move: None
        on_end(self)
        # It may hold the memory, which a waiting thread may free and want again at once.
        del on_end
        self._parts = []
        self.ended.set()
