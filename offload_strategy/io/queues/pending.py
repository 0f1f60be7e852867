"""What waits for a path in one direction, and what one request carries of it.

[Note: neighbours]
A system call, and waking the thread that makes it, cost the same for a small tensor as for a large
one. Tensors that are given away one after the other get places one behind the other on the path,
and a backward pass wants them back one before the other. So legs that follow each other in the
queue and are neighbours on the path go in one request (`pwritev`, `preadv`), up to the size of a
request. Each still ends, or fails, on its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass

from offload_strategy.io.queues.moves import Leg, MoveState
from offload_strategy.telemetry import Direction
from offload_strategy.units import PAGE_BYTES, round_up


class Lane:
    """One direction of a path: what waits, and how much is under way."""

    def __init__(self) -> None:
        # (priority, sequence, leg). A leg that became more urgent has a second entry; the stale
        # one is recognised by its priority and skipped.
        self.waiting: list[tuple[int, int, Leg]] = []
        self.under_way = 0
        self.bytes_under_way = 0
        self.urgent_under_way = 0

    def has_slot(self, slots: int, block_size: int) -> bool:
        """Whether another block may begin: of `slots` whole ones, or twice as many small ones."""
        most = 2 * slots if slots > 1 else slots
        return self.under_way < most and self.bytes_under_way < slots * block_size

    def head(self) -> Leg | None:
        """The most urgent leg with a block that has not begun."""
        while self.waiting:
            priority, _, leg = self.waiting[0]
            alive = leg.state in (MoveState.QUEUED, MoveState.RUNNING)
            if alive and priority == leg.priority and leg.next_block < leg.stripe.nbytes:
                return leg
            heapq.heappop(self.waiting)
        return None

    def take(self, leg: Leg, nbytes: int) -> None:
        """Begin the next block of a leg; once all are begun, `head` is another."""
        leg.next_block += nbytes
        leg.blocks_under_way += 1

    def neighbours(
        self, first: Leg, room: int, most: int, may_begin: Callable[[Leg], bool]
    ) -> list[Leg]:
        """Take the legs that come next and can go along with one that was taken whole.

        Args:
            first: the leg.
            room: bytes that may go along.
            most: how many legs together.
            may_begin: asked before each is taken.

        Returns:
            They and the first, in the order of their places on the path.
        """
        legs = [first]
        if most <= 1 or not _can_join(first):
            return legs
        low, high = _place(first)
        while len(legs) < most:
            leg = self.head()
            if leg is None or leg.priority is not first.priority or leg.stripe.nbytes > room:
                break
            if leg.state is not MoveState.QUEUED or not _can_join(leg):
                break
            begin, end = _place(leg)
            if begin != high and end != low:
                break
            if not may_begin(leg):
                break
            if begin == high:
                legs.append(leg)
                high = end
            else:
                legs.insert(0, leg)
                low = begin
            room -= leg.stripe.nbytes
            self.take(leg, leg.stripe.nbytes)
        return legs


def _can_join(leg: Leg) -> bool:
    """Whether its bytes can go between those of others: whole pages, and nothing to do apart."""
    move, stripe = leg.move, leg.stripe
    whole = move.direction is Direction.WRITE or move.whole_pages or not stripe.nbytes % PAGE_BYTES
    apart = move.before is not None or stripe.digests is not None
    return whole and not apart and leg.address % PAGE_BYTES == 0


def _place(leg: Leg) -> tuple[int, int]:
    begin = leg.stripe.extent.offset
    return begin, begin + round_up(leg.stripe.nbytes, PAGE_BYTES)


@dataclass(eq=False, slots=True)
class Carried:
    """What one request carries: a block of one leg, or several neighbouring legs.

    Args:
        lane: where it is under way.
        blocks: legs with where in each the block begins, and its bytes.
        urgent: whether somebody waits for it.
        begun: when it was taken for the backend (`time.perf_counter`).
        mark: what `Bandwidth.completed` is to be told of it.
    """

    lane: Lane
    blocks: list[tuple[Leg, int, int]]
    urgent: bool
    begun: float
    mark: float = 0.0
    nbytes: int = 0
    left: int = 0

    def __post_init__(self) -> None:
        self.nbytes = sum(nbytes for _, _, nbytes in self.blocks)
        self.left = len(self.blocks)
        self.lane.under_way += 1
        self.lane.bytes_under_way += self.nbytes
        self.lane.urgent_under_way += self.urgent

    def ended(self) -> bool:
        """One of its blocks is over; whether it was the last."""
        self.left -= 1
        if self.left:
            return False
        self.lane.under_way -= 1
        self.lane.bytes_under_way -= self.nbytes
        self.lane.urgent_under_way -= self.urgent
        return True
