"""The order of blocks on a path, and how moves end."""

from __future__ import annotations

import weakref
from functools import partial

import pytest

from offload_strategy.io.queues.moves import Latch, Move
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.telemetry import Recorder
from offload_strategy.units import PAGE_BYTES
from tests.io.backends import ManualBackend, extent, make_move


def submit(
    queue: PathQueue,
    page: int,
    pages: int = 1,
    priority: Priority = Priority.WRITE_BACK,
    *,
    write: bool | None = None,
    ended: list[Move] | None = None,
) -> Move:
    """Submit a move of whole pages, a write if it is a write-back."""
    move = make_move(
        queue,
        extent(page, pages),
        pages * PAGE_BYTES,
        write=priority is Priority.WRITE_BACK if write is None else write,
        priority=priority,
        on_end=(lambda move: None) if ended is None else ended.append,
    )
    move.submit()
    return move


def order(backend: ManualBackend) -> list[int]:
    """Complete everything; the pages in the order in which they moved."""
    pages = []
    while backend.waiting:
        pages.append(backend.complete().offset // PAGE_BYTES)
    return pages


# ---------------------------------------------------------------------- order


def test_a_needed_read_overtakes_prefetches_and_those_overtake_writes(queue, manual):
    submit(queue, 0, 3)
    submit(queue, 10, 2)
    submit(queue, 20, 2, Priority.PREFETCH)
    submit(queue, 30, 2, Priority.NEEDED_NOW)
    # The blocks in flight end first; then the most urgent, each in order.
    assert order(manual) == [0, 20, 30, 31, 21, 1, 2, 10, 11]


def test_priority_may_be_raised_between_two_blocks_of_a_move(queue, manual):
    slow = submit(queue, 0, 4, write=False)
    submit(queue, 10, 2, Priority.PREFETCH)
    assert manual.complete().offset == 0
    slow.raise_priority()
    assert order(manual) == [10, 1, 2, 3, 11]
    slow.raise_priority()  # it is over
    assert not manual.waiting
    submit(queue, 1)
    assert order(manual) == [1]


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_blocks_are_in_flight_than_the_backend_can_use(plain, depth):
    backend = ManualBackend(depth=depth)
    queue = PathQueue(plain, backend, Recorder())
    for index in range(4):
        submit(queue, 4 * index, 4)
    while backend.waiting:
        assert len(backend.waiting) <= depth
        backend.complete(at=len(backend.waiting) - 1)  # in any order


# ---------------------------------------------------------------------- cancelled and failed moves
def test_a_cancelled_move_that_never_began_ends_at_once(queue, manual, recorder):
    ended: list[Move] = []
    submit(queue, 0)
    move = submit(queue, 1, ended=ended)
    move.cancel()
    assert ended == [move]
    assert move.ended.is_set()
    assert move.state is MoveState.CANCELLED
    assert order(manual) == [0]
    assert [record.nbytes for record in recorder.moves] == [PAGE_BYTES]
    move.cancel()
    assert ended == [move]


def test_after_an_error_no_further_block_of_the_move_begins(queue, manual, recorder):
    ended: list[Move] = []
    move, other = submit(queue, 0, 5, ended=ended), submit(queue, 10)
    error = OSError("broken")
    manual.complete()
    manual.complete(error=error)
    assert move.state is MoveState.FAILED
    assert move.error is error
    assert ended == [move]
    assert order(manual) == [10]
    assert other.state is MoveState.DONE
    assert recorder.client_bytes["activations", "written"] == PAGE_BYTES


def test_a_backend_that_refuses_blocks_fails_all_queued_moves(queue, manual):
    moves = [submit(queue, 0) for _ in range(3000)]
    manual.close()
    manual.complete()  # the block in flight ends, and the next is refused, and so on
    moves.append(submit(queue, 0))
    assert moves[0].state is MoveState.DONE
    assert {move.state for move in moves[1:]} == {MoveState.FAILED}
    assert all(move.ended.is_set() for move in moves)


# ---------------------------------------------------------------------- memory and records


def test_memory_is_released_before_waiting_threads_wake(queue, manual):
    class Held:
        pass

    held = Held()
    found: list[object] = []

    class WatchedLatch(Latch):
        def set(self):
            found.extend(reference() for reference in references)
            super().set()

    def on_end(move, held):
        return

    move = make_move(queue, extent(0), PAGE_BYTES, on_end=partial(on_end, held=held))
    references = [weakref.ref(held), weakref.ref(move.keep_alive)]
    del held
    move.ended = WatchedLatch()
    move.submit()
    manual.complete_all()
    assert found == [None, None]
