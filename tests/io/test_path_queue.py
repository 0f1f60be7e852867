"""The order of blocks on a path, which go in one request, and how moves end."""

import weakref
from functools import partial
from typing import Any

import pytest

from offload_strategy.io.queues.moves import Latch
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.telemetry import Recorder
from offload_strategy.units import PAGE_BYTES, round_up
from tests.io.backends import ManualBackend, make_move, submit


def order(backend):
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


# ---------------------------------------------------------------------- adjacent moves
class AdjacentBackend(ManualBackend):
    """Takes adjacent requests, and records which came together."""

    max_adjacent = 8

    def __init__(self):
        super().__init__(block_size=16 * PAGE_BYTES)
        self.together: list[list[int]] = []

    def submit(self, requests):
        end = None
        for request in requests:
            assert end is None or request.offset == end, "not adjacent"
            assert request.address % PAGE_BYTES == 0 or len(requests) == 1
            end = request.offset + round_up(request.nbytes, PAGE_BYTES)
        self.together.append([request.offset // PAGE_BYTES for request in requests])
        super().submit(requests)


PREFETCH = {"priority": Priority.PREFETCH}
NEEDED = {"priority": Priority.NEEDED_NOW}
READ = {"write": False}
FILLS_PAGES = {"write": False, "is_buffer": True}
BYTE = 1 / PAGE_BYTES

#: Moves, of so many pages from a page on, and which of them go together.
TOGETHER: dict[str, tuple[list[tuple[int, float, dict[str, Any]]], list[list[int]]]] = {
    "writes": ([(3, 1, {}), (4, 1, {}), (5, 1, {})], [[3, 4, 5]]),
    "reads in reverse": ([(page, 1, PREFETCH) for page in (7, 6, 8, 5)], [[5, 6, 7, 8]]),
    "a partial page is written": ([(3, 1 + BYTE, {}), (5, 1, {})], [[3, 5]]),
    "a partial page may be filled": ([(3, 1 - BYTE, FILLS_PAGES), (4, 1, FILLS_PAGES)], [[3, 4]]),
    "as much as a block": ([(6 * n, 6, {}) for n in range(4)], [[0, 6], [12, 18]]),
    "needed now": ([(3, 1, NEEDED), (4, 1, NEEDED)], [[3], [4]]),
    "a gap": ([(3, 1, {}), (5, 1, {})], [[3], [5]]),
    "another priority": ([(3, 1, {}), (4, 1, {**PREFETCH, "write": True})], [[4], [3]]),
    "unaligned memory": ([(3, 1, {}), (4, 1, {"misalignment": 64})], [[3], [4]]),
    "a partial page is read": ([(3, 1, READ), (4, 1 - BYTE, READ)], [[3], [4]]),
}


@pytest.mark.parametrize(("moves", "expected"), TOGETHER.values(), ids=TOGETHER)
def test_adjacent_moves_go_together_and_others_alone(plain, moves, expected):
    backend = AdjacentBackend()
    queue = PathQueue(plain, backend, Recorder())
    for write in (True, False):  # these are under way while the others are queued
        submit(queue, 255, 1, Priority.PREFETCH, write=write)
    submitted = [submit(queue, page, pages, **options) for page, pages, options in moves]
    backend.complete_all()
    assert {move.state for move in submitted} == {MoveState.DONE}
    assert backend.together[2:] == expected


def test_adjacent_moves_share_a_slot_and_each_ends_on_its_own(plain):
    backend = AdjacentBackend()
    queue = PathQueue(plain, backend, Recorder())
    submit(queue, 100)
    moves = [submit(queue, page) for page in (3, 4, 5, 6, 9)]
    backend.complete()
    assert backend.together[1:] == [[3, 4, 5, 6]]
    moves[2].cancel()
    backend.complete()
    backend.complete(OSError("bad"))
    assert moves[3]._parts[0][1].state is MoveState.RUNNING
    assert len(backend.together) == 2, "the slot is taken until all are over"
    backend.complete_all()
    assert backend.together[2:] == [[9]]
    states = [MoveState.DONE, MoveState.FAILED, MoveState.CANCELLED, MoveState.DONE, MoveState.DONE]
    assert [move.state for move in moves] == states


# ---------------------------------------------------------------------- ends
def test_a_backend_that_refuses_blocks_fails_all_queued_moves(queue, manual):
    moves = [submit(queue, 0) for _ in range(3000)]
    manual.close()
    manual.complete()  # the block in flight ends, and the next is refused, and so on
    moves.append(submit(queue, 0))
    assert moves[0].state is MoveState.DONE
    assert {move.state for move in moves[1:]} == {MoveState.FAILED}
    assert all(move.ended.is_set() for move in moves)


def test_memory_is_released_before_waiting_threads_wake(queue, manual):
    held = {"anything"}
    found: list[object] = []

    class WatchedLatch(Latch):
        def set(self):
            found.extend(reference() for reference in references)
            super().set()

    move = make_move(queue, 0, on_end=partial(lambda held, move: None, held))
    references = [weakref.ref(held), weakref.ref(move.keep_alive)]
    del held
    move.ended = WatchedLatch()
    move.submit()
    manual.complete_all()
    assert found == [None, None]
