"""The queue of one path: moves are cut into blocks, and the most urgent block goes next."""

from __future__ import annotations

import heapq
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

from offload_strategy.io.backends.protocol import Backend, BlockRequest
from offload_strategy.io.bandwidth.estimator import Bandwidth
from offload_strategy.io.queues.checksums import Checksum, check_block
from offload_strategy.io.queues.moves import SMALL_BYTES, Leg, MoveState, Priority
from offload_strategy.io.queues.path_lock import PathLock
from offload_strategy.io.queues.path_lock_holder import TurnKeeper
from offload_strategy.io.queues.pending import Carried, Lane
from offload_strategy.io.regions.extents import Extent
from offload_strategy.telemetry import Direction, MoveRecord, Recorder
from offload_strategy.torch_support.deferred_interrupts import UninterruptedSection
from offload_strategy.units import PAGE_BYTES, MiB

#: Where blocks take less than this, a thread that waits for one had better move it itself.
_SOON_SECONDS = 0.002

#: The requests under way carry together what the path moves in about this time: larger ones cost
#: less CPU time per byte, but whoever needs something now waits until they are over.
_UNDER_WAY_SECONDS = 0.020
_LEAST_REQUEST_BYTES = 4 * MiB

#: Calm moves have one block under way while no more than this many legs wait.
_FEW_LEGS = 8


class Place(Protocol):
    """What a queue needs to know of a space or a foreign file."""

    tier: str
    path: Path
    fd: int

    def free(self, extent: Extent) -> None:
        """Take an extent back."""


class PathQueue:
    """Feeds one backend with the blocks of many moves.

    Only as many blocks are under way in each direction as the backend can use, so an urgent move
    waits for a few blocks at most, never for a queue of write-backs. Within a priority, first in is
    first out. Writes wait while a read is needed now, and make room while others are read ahead.

    Args:
        region: the path: a `Region`, or a `ExternalFile` to read from.
        backend: what moves its blocks; may be shared with other queues.
        recorder: where every move is noted.
        turns: share the path with other processes turn by turn.
        checksum: what to check every block with that is read.
    """

    def __init__(
        self,
        region: Place,
        backend: Backend,
        recorder: Recorder,
        *,
        turns: PathLock | None = None,
        checksum: Checksum | None = None,
    ) -> None:
        self.region = region
        self.backend = backend
        self.bandwidth = Bandwidth()
        self.checksum = checksum
        self._recorder = recorder
        self._lock = threading.Lock()
        self._reads = Lane()
        self._writes = Lane()
        self._sequence = 0
        self._dispatching = False
        # What a block takes at present, from when the backend gets it; 0 while nothing is known.
        self._usual_seconds = 0.0
        self._turn: TurnKeeper | None = None
        if turns is not None and turns.works:
            self._turn = TurnKeeper(turns, self._turn_granted)

    @property
    def path(self) -> Path:
        """Where it is."""
        return self.region.path

    @property
    def tier(self) -> str:
        """Name of the tier that it belongs to."""
        return self.region.tier

    def submit(self, leg: Leg) -> None:
        """Queue a leg of a move; returns at once. For `Move.submit`, which holds Ctrl-C back."""
        with self._lock:
            if leg.state is not MoveState.QUEUED:
                return  # another leg of its move failed before this one was queued
            self._push(leg)
        self._dispatch()
        if leg.stripe.nbytes <= SMALL_BYTES and getattr(self.backend, "not_begun", 0) > 1:
            # Threads that were woken to begin wait for the interpreter, and a caller that gives
            # away one small tensor after the other would keep it for milliseconds.
            time.sleep(0)

    def hurry(self, leg: Leg, priority: Priority = Priority.NEEDED_NOW) -> None:
        """Let a queued leg overtake others from now on."""
        with self._lock:
            if priority < leg.priority:
                leg.priority = priority
                self._push(leg)

    def cancel(self, leg: Leg) -> None:
        """Give a leg up: blocks under way finish, the others never start. For `Move.cancel`."""
        with self._lock:
            if leg.state not in (MoveState.QUEUED, MoveState.RUNNING):
                return
            started = leg.state is MoveState.RUNNING
            leg.state = MoveState.CANCELLED
            over = leg.blocks_under_way == 0
        if over:
            self._end(leg, started=started)
        # Writes may have been waiting for it.
        self._dispatch()

    def help(self) -> bool:
        """Move a block on the calling thread, which waits anyway; False if there is none.

        Only where blocks are over soon: Ctrl-C waits until it is.
        """
        if not 0 < self._usual_seconds < _SOON_SECONDS:
            return False
        helper = getattr(self.backend, "help", None)
        if helper is None:
            return False
        with UninterruptedSection():
            return bool(helper(str(self.path)))

    def close(self) -> None:
        """Give the turn back, if one is held; call it when nothing is under way any more."""
        if self._turn is not None:
            self._turn.close()

    # ------------------------------------------------------------------ choosing
    def _push(self, leg: Leg) -> None:
        self._sequence += 1
        heapq.heappush(self._lane(leg).waiting, (int(leg.priority), self._sequence, leg))

    def _lane(self, leg: Leg) -> Lane:
        return self._writes if leg.move.direction is Direction.WRITE else self._reads

    def _next_leg(self) -> Leg | None:
        depth = self.backend.depth
        reading = self._reads.head()
        if reading is not None and not self._may_read(reading):
            reading = None  # another process reads: nothing of ours that a write would hold up
        if reading is not None and self._reads.has_slot(
            self._slots(self._reads, reading), self._request_bytes(reading)
        ):
            return reading
        writing = self._writes.head()
        if writing is None:
            return None
        slots = self._slots(self._writes, writing)
        urgent = reading is not None and reading.priority is Priority.NEEDED_NOW
        if writing.priority is not Priority.NEEDED_NOW:
            if urgent or self._reads.urgent_under_way:
                slots = 0
            elif reading is not None or self._reads.under_way:
                slots = min(slots, max(1, depth // 2))
        return writing if self._writes.has_slot(slots, self._request_bytes(writing)) else None

    def _request_bytes(self, leg: Leg) -> int:
        """How much of a leg the next request carries at most."""
        most = self.backend.block_size
        if leg.stripe.digests is not None:
            return most  # each block has a checksum of its own
        rate = self.bandwidth.rate(leg.move.direction)
        wanted = most // 2 if rate is None else int(rate * _UNDER_WAY_SECONDS / self.backend.depth)
        wanted = max(wanted, _LEAST_REQUEST_BYTES)
        return min(most, wanted // PAGE_BYTES * PAGE_BYTES)

    def _slots(self, lane: Lane, head: Leg) -> int:
        """How many blocks of a lane may be under way."""
        calm = head.move.calm and head.priority is not Priority.NEEDED_NOW
        return 1 if calm and len(lane.waiting) <= _FEW_LEGS else self.backend.depth

    def _dispatch(self) -> None:
        with self._lock:
            if self._dispatching:
                return  # whoever does it now looks again before it stops
            self._dispatching = True
        while True:
            with self._lock:
                leg = self._next_leg()
                if leg is None:
                    self._dispatching = False
                    self._end_turn_if_idle()
                    return
                carried = self._take(leg)
            requests = [
                self._request(leg, begin, nbytes, partial(self._block_done, carried, leg))
                for leg, begin, nbytes in carried.blocks
            ]
            try:
                if len(requests) == 1:
                    self.backend.submit(requests[0])
                else:
                    self.backend.submit_neighbours(requests)  # type: ignore[attr-defined]
            except BaseException as error:
                for leg, _, _ in carried.blocks:
                    self._count_block(carried, leg, error)

    def _take(self, leg: Leg) -> Carried:
        """What the next request carries, which begins with a leg; with the lock held."""
        lane, room, begin = self._lane(leg), self._request_bytes(leg), leg.next_block
        nbytes = min(room, leg.stripe.nbytes - begin)
        lane.take(leg, nbytes)
        self._begins(leg, nbytes)
        urgent = leg.priority is Priority.NEEDED_NOW
        if urgent or nbytes < leg.stripe.nbytes:
            blocks = [(leg, begin, nbytes)]
        else:
            most = getattr(self.backend, "most_neighbours", 1)
            legs = lane.neighbours(leg, room - nbytes, most, self._may_join)
            blocks = [(leg, 0, leg.stripe.nbytes) for leg in legs]
        carried = Carried(lane, blocks, urgent, time.perf_counter())
        carried.mark = self.bandwidth.begins(carried.begun, saturated=self._saturated())
        return carried

    def _saturated(self) -> bool:
        """Whether all slots are taken."""
        return self._reads.under_way + self._writes.under_way >= self.backend.depth

    def _may_join(self, leg: Leg) -> bool:
        if leg.move.direction is Direction.READ and not self._may_read(leg):
            return False
        self._begins(leg, leg.stripe.nbytes)
        return True

    def _begins(self, leg: Leg, nbytes: int) -> None:
        """Note that a block of a leg begins."""
        if leg.state is MoveState.QUEUED:
            leg.state = MoveState.RUNNING
            leg.started_at = self._recorder.move_started(self.tier, leg.move.direction)
        if self._turn is not None and leg.move.direction is Direction.READ:
            self._turn.began(nbytes)

    def _request(
        self, leg: Leg, begin: int, nbytes: int, done: Callable[[BaseException | None], None]
    ) -> BlockRequest:
        move, stripe = leg.move, leg.stripe
        write = move.direction is Direction.WRITE
        request = BlockRequest(
            write=write,
            fd=self.region.fd,
            offset=stripe.extent.offset + begin,
            address=leg.address + begin,
            nbytes=nbytes,
            before=move.before,
            whole_pages=move.whole_pages,
            on_done=done,
        )
        if stripe.digests is not None and self.checksum is not None:
            check_block(request, self, stripe.digests, begin // self.backend.block_size)
        return request

    # ------------------------------------------------------------------ ends
    def _block_done(self, carried: Carried, leg: Leg, error: BaseException | None) -> None:
        over = self._count_block(carried, leg, error)
        if over and (self._reads.waiting or self._writes.waiting or self._turn is not None):
            self._dispatch()

    def _count_block(self, carried: Carried, leg: Leg, error: BaseException | None) -> bool:
        """A leg's block is over; whether all of its request is."""
        with self._lock:
            now = time.perf_counter()
            saturated = self._saturated()
            if all_over := carried.ended():
                self._usual_seconds += (now - carried.begun - self._usual_seconds) / 4
                direction, lane, nbytes = leg.move.direction, carried.lane, carried.nbytes
                self.bandwidth.completed(
                    direction,
                    nbytes,
                    now,
                    begun=carried.begun,
                    mark=carried.mark,
                    saturated=self._saturated(),
                )
                waiting, under_way = bool(lane.waiting), lane.under_way
                idle = not (self._reads.under_way or self._writes.under_way)
                self.bandwidth.carried(
                    direction,
                    nbytes,
                    now,
                    full=saturated and (waiting or under_way + 1 >= self.backend.depth),
                    goes_on=under_way > 0 or (idle and waiting),
                )
            leg.blocks_under_way -= 1
            if error is not None and leg.state is MoveState.RUNNING:
                leg.state = MoveState.FAILED
                leg.error = error
            over = leg.blocks_under_way == 0 and (
                leg.state is not MoveState.RUNNING or leg.next_block >= leg.stripe.nbytes
            )
            if over and leg.state is MoveState.RUNNING:
                leg.state = MoveState.DONE
        if over:
            self._end(leg, started=True)
        return all_over

    def _end(self, leg: Leg, *, started: bool) -> None:
        move = leg.move
        if started:
            record = MoveRecord(
                move.client,
                self.tier,
                str(self.path),
                move.direction,
                leg.stripe.nbytes,
                move.queued_at,
                leg.started_at,
                time.perf_counter(),
            )
            self._recorder.move_finished(record, completed=leg.state is MoveState.DONE)
        move.leg_ended(leg)

    # ------------------------------------------------------------------ turns
    def _may_read(self, leg: Leg) -> bool:
        """Whether another block of a leg that reads may begin: see [Note: turns are for reads]."""
        return self._turn is None or self._turn.may_begin(new=leg.state is MoveState.QUEUED)

    def _end_turn_if_idle(self) -> None:
        turn = self._turn
        if turn is None or not turn.held or self._reads.under_way:
            return
        turn.give_back()
        if self._reads.head() is not None:
            turn.may_begin(new=True)

    def _turn_granted(self) -> None:
        with self._lock:
            assert self._turn is not None
            self._turn.grant()
        self._dispatch()
