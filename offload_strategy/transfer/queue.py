"""The queue of one path: moves are cut into blocks, and the most urgent block goes next."""

from __future__ import annotations

import heapq
import threading
import time
from functools import partial

from offload_strategy.storage import Backend, BlockRequest, Space
from offload_strategy.telemetry import MoveRecord, Recorder
from offload_strategy.transfer.interrupts import UninterruptedSection
from offload_strategy.transfer.moves import Move, MoveState, Priority


class PathQueue:
    """Feeds one backend with the blocks of many moves.

    Only as many blocks are under way as the backend can use, so an urgent move waits for a few
    blocks at most, never for a queue of write-backs. Within a priority, first in is first out.

    Args:
        space: the path.
        backend: what moves its blocks.
        recorder: where every move is noted.
    """

    def __init__(self, space: Space, backend: Backend, recorder: Recorder) -> None:
        self.space = space
        self._backend = backend
        self._recorder = recorder
        self._lock = threading.Lock()
        # (priority, sequence, move). A move that became more urgent has a second entry; the stale
        # one is recognised by its priority and skipped.
        self._waiting: list[tuple[int, int, Move]] = []
        self._sequence = 0
        self._under_way = 0

    def submit(self, move: Move) -> None:
        """Queue a move; returns at once."""
        with UninterruptedSection():
            with self._lock:
                self._push(move)
            self._dispatch()

    def hurry(self, move: Move, priority: Priority = Priority.NEEDED_NOW) -> None:
        """Let a queued move overtake others from now on."""
        with self._lock:
            if priority < move.priority:
                move.priority = priority
                self._push(move)

    def cancel(self, move: Move) -> None:
        """Give a move up: blocks under way finish, the others never start.

        `on_end` is called as for any move, at once if nothing was under way.
        """
        with UninterruptedSection():
            with self._lock:
                if move.state not in (MoveState.QUEUED, MoveState.RUNNING):
                    return
                started = move.state is MoveState.RUNNING
                move.state = MoveState.CANCELLED
                over = move.blocks_under_way == 0
            if over:
                self._end(move, started=started)

    def _push(self, move: Move) -> None:
        self._sequence += 1
        heapq.heappush(self._waiting, (int(move.priority), self._sequence, move))

    def _dispatch(self) -> None:
        while True:
            with self._lock:
                if self._under_way >= self._backend.depth:
                    return
                picked = self._next_block()
                if picked is None:
                    return
                move, begin = picked
                self._under_way += 1
                move.blocks_under_way += 1
                if move.state is MoveState.QUEUED:
                    move.state = MoveState.RUNNING
                    move.started_at = self._recorder.move_started(self.space.tier, move.direction)
            nbytes = min(self._backend.block_size, move.nbytes - begin)
            try:
                self._backend.submit(
                    BlockRequest(
                        write=move.direction == "write",
                        fd=self.space.fd,
                        offset=move.extent.offset + begin,
                        address=move.address + begin,
                        nbytes=nbytes,
                        before=move.before,
                        on_done=partial(self._block_done, move),
                    )
                )
            except BaseException as error:
                self._count_block(move, error)

    def _next_block(self) -> tuple[Move, int] | None:
        while self._waiting:
            priority, _, move = self._waiting[0]
            alive = move.state in (MoveState.QUEUED, MoveState.RUNNING)
            if not alive or priority != move.priority or move.next_block >= move.nbytes:
                heapq.heappop(self._waiting)
                continue
            begin = move.next_block
            move.next_block += self._backend.block_size
            return move, begin
        return None

    def _block_done(self, move: Move, error: BaseException | None) -> None:
        self._count_block(move, error)
        self._dispatch()

    def _count_block(self, move: Move, error: BaseException | None) -> None:
        with self._lock:
            self._under_way -= 1
            move.blocks_under_way -= 1
            if error is not None and move.state is MoveState.RUNNING:
                move.state = MoveState.FAILED
                move.error = error
            over = move.blocks_under_way == 0 and (
                move.state is not MoveState.RUNNING or move.next_block >= move.nbytes
            )
            if over and move.state is MoveState.RUNNING:
                move.state = MoveState.DONE
        if over:
            self._end(move, started=True)

    def _end(self, move: Move, *, started: bool) -> None:
        move.finished_at = time.perf_counter()
        if started:
            record = MoveRecord(
                move.client,
                self.space.tier,
                move.direction,
                move.nbytes,
                move.queued_at,
                move.started_at,
                move.finished_at,
            )
            self._recorder.move_finished(record, completed=move.state is MoveState.DONE)
        move.keep_alive = move.before = None
        move.on_end(move)
        move.ended.set()
