"""The queue of one direction of a path, and what is queued in it: moves, one part per stripe.

[Note: adjacent stripes]
A system call, and waking the thread that makes it, cost the same for a small tensor as for a large
one. Tensors that are offloaded one after the other get adjacent extents, and backward loads them in
reverse order. So parts that follow each other in the queue and are adjacent on the path go in one
request (`pwritev`, `preadv`). Each still completes, or fails, on its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, IntEnum

from offload_strategy.io.bandwidth.estimator import Begun
from offload_strategy.io.queues.checksums import Digests
from offload_strategy.io.queues.encryption import Tags
from offload_strategy.telemetry import Direction
from offload_strategy.units import PAGE_BYTES, round_up


class Priority(IntEnum):
    """Which queued block goes next; lower overtakes higher."""

    NEEDED_NOW = 0
    PREFETCH = 1
    WRITE_BACK = 2


class MoveState(Enum):
    """QUEUED -> RUNNING -> DONE | FAILED | CANCELLED; a queued one may be cancelled directly."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(eq=False, slots=True)
class StripeMove:
    """The part of a move that concerns one stripe; the path's queue is its only writer.

    `offset` is in bytes on the path; `digests` are those of the stripe, on paths with checksums;
    `on_end` is called once it is done, failed or cancelled. For the hints see `Move`.
    """

    offset: int
    nbytes: int
    address: int
    digests: Digests | Tags | None
    client: str
    direction: Direction
    priority: Priority
    on_end: Callable[[StripeMove], None]
    queued_at: float
    one_block_at_a_time: bool
    is_buffer: bool
    state: MoveState = MoveState.QUEUED
    error: BaseException | None = None
    started_at: float = 0.0
    next_block: int = 0
    blocks_in_flight: int = 0

    @property
    def is_over(self) -> bool:
        """Whether it is done, failed or cancelled."""
        return self.state is not MoveState.QUEUED and self.state is not MoveState.RUNNING


class RequestQueue:
    """One direction of a path: what waits, and how much is in flight."""

    def __init__(self) -> None:
        # (priority, sequence, part). A part whose priority was raised has a second entry; the
        # stale one is recognised by its priority and skipped.
        self.waiting: list[tuple[int, int, StripeMove]] = []
        self.in_flight = 0
        self.bytes_in_flight = 0
        self.urgent_in_flight = 0

    def has_slot(self, slots: int, block_size: int) -> bool:
        """Whether another block may begin: `slots` full ones, or twice as many small ones."""
        most = 2 * slots if slots > 1 else slots
        return self.in_flight < most and self.bytes_in_flight < slots * block_size

    def head(self) -> StripeMove | None:
        """The most urgent part with a block that has not begun."""
        while self.waiting:
            priority, _, part = self.waiting[0]
            if not part.is_over and priority == part.priority and part.next_block < part.nbytes:
                return part
            heapq.heappop(self.waiting)
        return None

    def take_adjacent(
        self, first: StripeMove, room: int, most: int, begin: Callable[[StripeMove], bool]
    ) -> list[StripeMove]:
        """Take the next parts that can share a request with `first`, which has begun whole.

        The others may have `room` bytes, and all together are at most `most` parts; `begin` is
        called for each, and tells whether it may. Returns all in the order of their offsets.
        """
        parts = [first]
        while len(parts) < most and _can_join(first):
            part = self.head()
            if part is None or part.priority is not first.priority or part.nbytes > room:
                break
            if part.state is not MoveState.QUEUED or not _can_join(part):
                break
            follows, precedes = part.offset == _end(parts[-1]), _end(part) == parts[0].offset
            if not (follows or precedes) or not begin(part):
                break
            parts.insert(len(parts) if follows else 0, part)
            room -= part.nbytes
        return parts


def _can_join(part: StripeMove) -> bool:
    """Whether its bytes can share a request: whole pages, which move from where they are."""
    whole = part.direction is Direction.WRITE or part.is_buffer or not part.nbytes % PAGE_BYTES
    staged = part.digests is not None and part.digests.stages
    return whole and not staged and part.address % PAGE_BYTES == 0


def _end(part: StripeMove) -> int:
    return part.offset + round_up(part.nbytes, PAGE_BYTES)


@dataclass(eq=False, slots=True)
class InFlight:
    """A request: blocks, each with its part, its begin therein and its bytes."""

    queue: RequestQueue
    blocks: list[tuple[StripeMove, int, int]]
    urgent: bool
    begun: Begun = field(default=Begun(0.0, 0.0))
    nbytes: int = 0
    left: int = 0

    def __post_init__(self) -> None:
        self.nbytes = sum(nbytes for _, _, nbytes in self.blocks)
        self.left = len(self.blocks)
        self.queue.in_flight += 1
        self.queue.bytes_in_flight += self.nbytes
        self.queue.urgent_in_flight += self.urgent

    def block_ended(self) -> bool:
        """Count one of its blocks as over; returns whether it was the last."""
        self.left -= 1
        if self.left:
            return False
        self.queue.in_flight -= 1
        self.queue.bytes_in_flight -= self.nbytes
        self.queue.urgent_in_flight -= self.urgent
        return True
