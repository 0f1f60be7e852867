"""One move of a ticket's bytes between host memory and the paths where it lies, and its life."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

from offload_strategy.io.regions.extents import Extent
from offload_strategy.telemetry import Direction
from offload_strategy.torch_support.deferred_interrupts import UninterruptedSection
from offload_strategy.units import MiB

if TYPE_CHECKING:
    from offload_strategy.io.queues.path_queue import PathQueue


#: A move of no more than this is waited for awake at first: to fall asleep and to be woken costs as
#: much as to read a small tensor.
SMALL_BYTES = 2 * MiB
_AWAKE_SECONDS = 0.0004


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

    def wait_awake(self, seconds: float) -> None:
        """Wait without falling asleep, for what will be over in a moment."""
        deadline = time.monotonic() + seconds
        while not self._is_set and time.monotonic() < deadline:
            time.sleep(0)  # lets others run

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
    """QUEUED -> RUNNING -> DONE | FAILED | CANCELLED; a queued one may be cancelled outright."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False, slots=True)
class Stripe:
    """Where a part of a ticket lies: one extent of one path.

    Args:
        queue: of the path.
        extent: on the path.
        begin: which byte of the ticket comes first.
        nbytes: how many.
        digests: a checksum for each block, where the path keeps them.
    """

    queue: PathQueue
    extent: Extent
    begin: int
    nbytes: int
    digests: list[int] | None = None


@dataclass(eq=False, slots=True)
class Leg:
    """A move's part on one path; the path's queue is its only writer."""

    move: Move
    stripe: Stripe
    address: int
    priority: Priority
    state: MoveState = MoveState.QUEUED
    error: BaseException | None = None
    started_at: float = 0.0
    next_block: int = 0
    blocks_under_way: int = 0


class Move:
    """Bytes on their way between memory and one or several paths.

    Args:
        client: who asked, for metrics.
        direction: read from, or written to, the paths.
        stripes: where the bytes lie on paths; at least one, none of them empty.
        address: where they lie in memory.
        nbytes: how many bytes.
        priority: of the blocks, while they are queued.
        keep_alive: what owns the memory; dropped when the move ends.
        before: called on the I/O side before each block, for instance to wait for a device copy
            into the memory that is to be written.
        calm: one block at a time while nobody waits for it and few others do: each thread that
            moves bytes takes a core away from a host that computes.
        whole_pages: a read may fill its memory to the end of the last page.
        on_end: called once when the move has ended, on an I/O thread or on the thread that
            cancelled it. Must not raise.
    """

    __slots__ = (
        "_finished",
        "_legs_left",
        "_lock",
        "before",
        "calm",
        "client",
        "direction",
        "ended",
        "error",
        "finished_at",
        "keep_alive",
        "legs",
        "nbytes",
        "on_end",
        "queued_at",
        "whole_pages",
    )

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
        before: Callable[[], None] | None = None,
        calm: bool = False,
        whole_pages: bool = False,
    ) -> None:
        self.client = client
        self.calm = calm
        self.whole_pages = whole_pages
        self.direction = direction
        self.nbytes = nbytes
        self.keep_alive = keep_alive
        self.before = before
        self.on_end = on_end
        self.legs = [Leg(self, stripe, address + stripe.begin, priority) for stripe in stripes]
        self.error: BaseException | None = None
        self.queued_at = time.perf_counter()
        self.finished_at = 0.0
        self.ended = Latch()
        self._legs_left = len(self.legs)
        self._finished: MoveState | None = None
        self._lock = threading.Lock()

    @property
    def state(self) -> MoveState:
        """How far it is."""
        if self._finished is not None:
            return self._finished
        begun = any(leg.state is not MoveState.QUEUED for leg in self.legs)
        return MoveState.RUNNING if begun else MoveState.QUEUED

    def submit(self) -> None:
        """Queue it on all of its paths; returns at once."""
        with UninterruptedSection():
            for leg in self.legs:
                leg.stripe.queue.submit(leg)

    def help(self) -> None:
        """For a thread that is about to wait for it: do what can be done on that thread."""
        while not self.ended.is_set() and any(leg.stripe.queue.help() for leg in self.legs):
            pass
        if self.nbytes <= SMALL_BYTES:
            self.ended.wait_awake(_AWAKE_SECONDS)

    def hurry(self, priority: Priority = Priority.NEEDED_NOW) -> None:
        """Let what is still queued overtake others from now on."""
        for leg in self.legs:
            leg.stripe.queue.hurry(leg, priority)

    def cancel(self) -> None:
        """Give it up: blocks under way finish, the others never start.

        `on_end` is called as for any move, at once if nothing was under way.
        """
        with UninterruptedSection():
            for leg in self.legs:
                leg.stripe.queue.cancel(leg)

    def fail(self, error: BaseException) -> None:
        """Make an ended move a failed one: for its `on_end`, when what it has to do fails."""
        self.error = error
        self._finished = MoveState.FAILED

    def unfinished_paths(self) -> list[str]:
        """The paths that it still waits for."""
        over = (MoveState.DONE, MoveState.FAILED, MoveState.CANCELLED)
        return [str(leg.stripe.queue.path) for leg in self.legs if leg.state not in over]

    def leg_ended(self, leg: Leg) -> None:
        """For the queues: a leg is over. The last one ends the move."""
        with self._lock:
            self._legs_left -= 1
            last = self._legs_left == 0
            give_up = leg.state is MoveState.FAILED and self.error is None
            if give_up:
                self.error = leg.error
        if give_up and not last:
            # A part is lost: the rest is of no use.
            self.cancel()
        if last:
            self._end()

    def _end(self) -> None:
        states = {leg.state for leg in self.legs}
        if self.error is not None:
            self._finished = MoveState.FAILED
        elif MoveState.CANCELLED in states:
            self._finished = MoveState.CANCELLED
        else:
            self._finished = MoveState.DONE
        self.finished_at = time.perf_counter()
        on_end = self.on_end
        # What it held must not wait for a garbage collection: legs and move refer to each other.
        self.keep_alive = self.before = None
        self.on_end = _nothing
        on_end(self)
        # It may hold the memory: whoever waits may give that back, and want it again at once.
        del on_end
        self.legs = []
        self.ended.set()


def _nothing(move: Move) -> None:
    return
