"""Moves of adjacent extents go in one request; each ends on its own."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence

import pytest

from offload_strategy.io.backends.protocol import BlockRequest, create_backend
from offload_strategy.io.queues.moves import Move
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.units import PAGE_BYTES, round_up
from tests.io.backends import ManualBackend, extent, make_move

PAGES = 256


class AdjacentBackend(ManualBackend):
    """Takes adjacent requests, and records which came together."""

    def __init__(self, most: int = 8, depth: int = 1) -> None:
        super().__init__(depth, block_size=16 * PAGE_BYTES)
        self.max_adjacent = most
        self.together: list[list[int]] = []

    def submit(self, requests: Sequence[BlockRequest]) -> None:
        end = None
        for request in requests:
            assert end is None or request.offset == end, "not adjacent"
            assert request.address % PAGE_BYTES == 0 or len(requests) == 1
            end = request.offset + round_up(request.nbytes, PAGE_BYTES)
        self.together.append([request.offset // PAGE_BYTES for request in requests])
        super().submit(requests)


@pytest.fixture
def backend():
    return AdjacentBackend()


@pytest.fixture
def queue(plain, backend):
    return PathQueue(plain, backend, Recorder())


def aligned(
    queue: PathQueue,
    page: int,
    nbytes: int = PAGE_BYTES,
    *,
    misalignment: int = 0,
    **options: object,
) -> Move:
    """A move over memory that begins with a page."""
    pages = -(-nbytes // PAGE_BYTES)
    move = make_move(queue, extent(page, pages), nbytes, **options)  # type: ignore[arg-type]
    memory = (ctypes.c_char * ((pages + 2) * PAGE_BYTES))()
    begin = ctypes.addressof(memory)
    move.parts[0].address = begin + -begin % PAGE_BYTES + misalignment
    move.keep_alive = memory
    return move


def submitted(queue: PathQueue, moves: Sequence[Move], backend: AdjacentBackend) -> list[list[int]]:
    """The pages that went together behind a first move that is alone under way."""
    write = moves[0].direction is Direction.WRITE
    aligned(queue, PAGES - 1, write=write, priority=Priority.PREFETCH).submit()
    for move in moves:
        move.submit()
    backend.complete_all()
    assert all(move.state is MoveState.DONE for move in moves)
    return backend.together[1:]


READ = {"write": False, "priority": Priority.PREFETCH}
FILLS_PAGES = {"write": False, "whole_pages": True}


TOGETHER: dict[str, tuple[list[tuple[int, float, dict[str, object]]], list[list[int]]]] = {
    "writes": ([(3, 1, {}), (4, 1, {}), (5, 1, {})], [[3, 4, 5]]),
    "reads in reverse": ([(page, 1, READ) for page in (7, 6, 8, 5)], [[5, 6, 7, 8]]),
    "a partial page is written": ([(3, 1 + 1 / PAGE_BYTES, {}), (5, 1, {})], [[3, 5]]),
    "a partial page may be filled": (
        [(3, 1 - 1 / PAGE_BYTES, FILLS_PAGES), (4, 1, FILLS_PAGES)],
        [[3, 4]],
    ),
    "as much as a block": ([(6 * n, 6, {}) for n in range(4)], [[0, 6], [12, 18]]),
    "needed now": (
        [(page, 1, {"write": False, "priority": Priority.NEEDED_NOW}) for page in (3, 4)],
        [[3], [4]],
    ),
    "a gap": ([(3, 1, {}), (5, 1, {})], [[3], [5]]),
    "another priority": ([(3, 1, {}), (4, 1, {"priority": Priority.PREFETCH})], [[4], [3]]),
    "unaligned memory": ([(3, 1, {}), (4, 1, {"misalignment": 64})], [[3], [4]]),
    "a partial page is read": (
        [(3, 1, {"write": False}), (4, 1 - 1 / PAGE_BYTES, {"write": False})],
        [[3], [4]],
    ),
}


@pytest.mark.parametrize(("moves", "expected"), TOGETHER.values(), ids=TOGETHER)
def test_adjacent_moves_go_together_and_others_alone(queue, backend, moves, expected):
    made = [aligned(queue, at, int(size * PAGE_BYTES), **more) for at, size, more in moves]
    assert submitted(queue, made, backend) == expected


def test_adjacent_moves_share_a_slot_and_each_ends_on_its_own(queue, backend):
    aligned(queue, 100).submit()
    moves = [aligned(queue, page) for page in (3, 4, 5, 6, 9)]
    for move in moves:
        move.submit()
    backend.complete()
    assert backend.together[1:] == [[3, 4, 5, 6]]
    moves[2].cancel()
    backend.complete()
    backend.complete(OSError("bad"))
    assert moves[3].state is MoveState.RUNNING
    assert len(backend.together) == 2, "the slot is taken until all are over"
    backend.complete_all()
    assert backend.together[2:] == [[9]]
    states = [MoveState.DONE, MoveState.FAILED, MoveState.CANCELLED, MoveState.DONE, MoveState.DONE]
    assert [move.state for move in moves] == states


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
@pytest.mark.parametrize("how", ["fails", "short"])
def test_a_request_that_fails_is_tried_again_one_by_one(region, monkeypatch, call, how):
    """The error of one move is its own; the others complete."""
    backend = create_backend("posix", threads=1, block_size=32 * PAGE_BYTES)
    real, calls = getattr(os, call), []

    def broken(fd, views, offset):
        calls.append(len(views))
        bad = offset <= 4 * PAGE_BYTES < offset + sum(map(len, views))
        if len(views) > 1 and how == "short":
            return int(real(fd, views[:1], offset))
        if bad and how == "fails":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return int(real(fd, views, offset))

    queue = PathQueue(region, backend, Recorder())
    moves = [aligned(queue, page, write=call == "pwritev") for page in (3, 4, 5)]
    ends: list[BaseException | None] = []
    requests = [queue._request(move.parts[0], 0, PAGE_BYTES, ends.append) for move in moves]
    monkeypatch.setattr(os, call, broken)
    try:
        backend.submit(requests)
    finally:
        backend.close()
    assert calls == [3, 1, 1, 1]
    if how == "short":
        assert ends == [None, None, None]
    else:
        assert ends[0] is ends[2] is None
        assert isinstance(ends[1], OSError)
        assert ends[1].errno == errno.EIO
