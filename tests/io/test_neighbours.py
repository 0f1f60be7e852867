"""Moves that lie next to each other go in one request; each ends on its own."""

from __future__ import annotations

import ctypes
import errno
import os
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from offload_strategy.io.backends.protocol import BlockRequest, create_backend
from offload_strategy.io.queues.moves import Move
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.units import PAGE_BYTES
from tests.io.backends import ManualBackend, extent, make_move, plain_region

PAGES = 256


class JoiningBackend(ManualBackend):
    """Also takes neighbours, and says which came together."""

    def __init__(self, most: int = 8, depth: int = 1) -> None:
        super().__init__(depth, block_size=16 * PAGE_BYTES)
        self.max_adjacent = most
        self.together: list[list[int]] = []

    def submit(self, request: BlockRequest) -> None:
        self.submit_adjacent([request])

    def submit_adjacent(self, requests: Sequence[BlockRequest]) -> None:
        if self.closed:
            raise RuntimeError("the backend is closed")
        end = None
        for request in requests:
            assert end is None or request.offset == end, "no neighbours"
            assert request.address % PAGE_BYTES == 0 or len(requests) == 1
            end = request.offset - -request.nbytes // PAGE_BYTES * PAGE_BYTES
        self.together.append([request.offset // PAGE_BYTES for request in requests])
        self.waiting.extend(requests)


@pytest.fixture
def region(disk: Path) -> Iterator[Region]:
    made = plain_region(disk, PAGES * PAGE_BYTES)
    made.allocate(PAGES * PAGE_BYTES)
    yield made
    made.close()


@pytest.fixture
def backend() -> JoiningBackend:
    return JoiningBackend()


@pytest.fixture
def queue(region: Region, backend: JoiningBackend) -> PathQueue:
    return PathQueue(region, backend, Recorder())


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


def submitted(queue: PathQueue, moves: Sequence[Move], backend: JoiningBackend) -> list[list[int]]:
    """The pages that went together behind a first move that is alone under way."""
    write = moves[0].direction is Direction.WRITE
    aligned(queue, PAGES - 1, write=write, priority=Priority.PREFETCH).submit()
    for move in moves:
        move.submit()
    backend.complete_all()
    assert all(move.state is MoveState.DONE for move in moves)
    return backend.together[1:]


def test_what_follows_in_the_queue_and_on_the_path_goes_together(
    queue: PathQueue, backend: JoiningBackend
) -> None:
    moves = [aligned(queue, page) for page in (3, 4, 5)]
    assert submitted(queue, moves, backend) == [[3, 4, 5]]


def test_a_way_back_is_joined_as_well(queue: PathQueue, backend: JoiningBackend) -> None:
    options = {"write": False, "priority": Priority.PREFETCH}
    moves = [aligned(queue, page, **options) for page in (7, 6, 8, 5)]
    assert submitted(queue, moves, backend) == [[5, 6, 7, 8]]


def test_a_part_of_a_page_takes_the_page(queue: PathQueue, backend: JoiningBackend) -> None:
    moves = [aligned(queue, 3, PAGE_BYTES + 1), aligned(queue, 5)]
    assert submitted(queue, moves, backend) == [[3, 5]]


@pytest.mark.parametrize(
    ("what", "expected"),
    {
        "a gap": [[3], [5]],
        "another priority": [[4], [3]],
        "not at a page's begin": [[3], [4]],
        "something to do before": [[3], [4]],
        "a read of a part of a page": [[3], [4]],
    }.items(),
)
def test_what_cannot_join_goes_alone(
    queue: PathQueue, backend: JoiningBackend, what: str, expected: list[list[int]]
) -> None:
    first = aligned(queue, 3)
    second = {
        "a gap": lambda: aligned(queue, 5),
        "another priority": lambda: aligned(queue, 4, priority=Priority.PREFETCH),
        "not at a page's begin": lambda: aligned(queue, 4, misalignment=64),
        "something to do before": lambda: aligned(queue, 4, before=lambda: None),
        "a read of a part of a page": lambda: aligned(queue, 4, PAGE_BYTES - 1, write=False),
    }[what]()
    if second.direction is not first.direction:
        first = aligned(queue, 3, write=False)
    assert submitted(queue, [first, second], backend) == expected


def test_a_read_of_a_part_of_a_page_joins_where_the_whole_page_may_be_filled(
    queue: PathQueue, backend: JoiningBackend
) -> None:
    options = {"write": False, "whole_pages": True}
    moves = [aligned(queue, 3, PAGE_BYTES - 1, **options), aligned(queue, 4, **options)]
    assert submitted(queue, moves, backend) == [[3, 4]]


def test_no_more_than_a_request_carries_go_together(
    queue: PathQueue, backend: JoiningBackend
) -> None:
    moves = [aligned(queue, 6 * number, 6 * PAGE_BYTES) for number in range(4)]
    # A block has 16 pages.
    assert submitted(queue, moves, backend) == [[0, 6], [12, 18]]


def test_no_more_legs_go_together_than_the_backend_takes(region: Region) -> None:
    backend = JoiningBackend(most=2)
    queue = PathQueue(region, backend, Recorder())
    moves = [aligned(queue, page) for page in (3, 4, 5)]
    assert submitted(queue, moves, backend) == [[3, 4], [5]]


def test_what_is_needed_now_waits_for_no_neighbour(
    queue: PathQueue, backend: JoiningBackend
) -> None:
    options = {"write": False, "priority": Priority.NEEDED_NOW}
    assert submitted(queue, [aligned(queue, page, **options) for page in (3, 4)], backend) == [
        [3],
        [4],
    ]


def test_neighbours_take_one_slot_until_the_last_is_over(region: Region) -> None:
    backend = JoiningBackend(depth=1)
    queue = PathQueue(region, backend, Recorder())
    first = aligned(queue, 100)
    first.submit()
    moves = [aligned(queue, page) for page in (3, 4, 9)]
    for move in moves:
        move.submit()
    backend.complete()
    assert backend.together[1:] == [[3, 4]]
    backend.complete()
    assert moves[0].state is MoveState.DONE
    assert moves[1].state is MoveState.RUNNING
    assert backend.together[1:] == [[3, 4]], "the slot is taken until both are over"
    backend.complete()
    assert backend.together[1:] == [[3, 4], [9]]
    backend.complete_all()


def test_each_fails_and_is_cancelled_on_its_own(queue: PathQueue, backend: JoiningBackend) -> None:
    aligned(queue, 100).submit()
    moves = [aligned(queue, page) for page in (3, 4, 5, 6)]
    for move in moves:
        move.submit()
    backend.complete()
    assert backend.together[1:] == [[3, 4, 5, 6]]
    moves[2].cancel()
    backend.complete()
    backend.complete(OSError("bad"))
    backend.complete_all()
    states = [MoveState.DONE, MoveState.FAILED, MoveState.CANCELLED, MoveState.DONE]
    assert [move.state for move in moves] == states
    again = aligned(queue, 3)
    again.submit()
    backend.complete_all()
    assert again.state is MoveState.DONE


def test_a_backend_that_refuses_neighbours_fails_them_all(
    queue: PathQueue, backend: JoiningBackend
) -> None:
    aligned(queue, 100).submit()
    moves = [aligned(queue, page) for page in (3, 4)]
    for move in moves:
        move.submit()
    backend.closed = True
    backend.complete()
    assert [move.state for move in moves] == 2 * [MoveState.FAILED]


def test_many_moves_of_any_size_come_back_as_they_were(disk: Path) -> None:
    """Over the real backend, with what joins and what does not."""
    random_ = random.Random(5)
    region = Region(disk, "nvme", 1024 * PAGE_BYTES)
    backend = create_backend("posix", threads=2, block_size=32 * PAGE_BYTES)
    queue = PathQueue(region, backend, Recorder())
    written, read = [], []
    try:
        for _ in range(100):
            nbytes = random_.choice([PAGE_BYTES, 2 * PAGE_BYTES, 3 * PAGE_BYTES + 77, 500])
            place = region.allocate(nbytes)
            assert place is not None
            move = aligned(
                queue,
                place.offset // PAGE_BYTES,
                nbytes,
                misalignment=random_.choice([0, 0, 0, 0, 64]),
            )
            data = random_.randbytes(nbytes)
            memory = move.keep_alive
            ctypes.memmove(move.parts[0].address, data, nbytes)
            move.submit()
            written.append((move, place, data, memory))
        for move, _, _, _ in written:
            assert move.ended.wait(60)
            assert move.state is MoveState.DONE
        for _, place, data, _ in reversed(written):
            move = aligned(
                queue,
                place.offset // PAGE_BYTES,
                len(data),
                write=False,
                whole_pages=True,
                priority=Priority.PREFETCH,
            )
            address, memory = move.parts[0].address, move.keep_alive
            move.submit()
            read.append((move, address, memory, data))
        for move, address, _, data in read:
            assert move.ended.wait(60)
            assert move.state is MoveState.DONE
            assert ctypes.string_at(address, len(data)) == data
    finally:
        backend.close()
        region.close()


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
@pytest.mark.parametrize("how", ["fails", "short"])
def test_what_fails_together_is_tried_one_by_one(
    disk: Path, monkeypatch: pytest.MonkeyPatch, call: str, how: str
) -> None:
    """An error within one of them is that one's; the others arrive."""
    region = Region(disk, "nvme", 64 * PAGE_BYTES)
    region.allocate(64 * PAGE_BYTES)
    backend = create_backend("posix", threads=1, block_size=32 * PAGE_BYTES)
    real, calls = getattr(os, call), []

    def broken(fd: int, views: list[memoryview], offset: int) -> int:
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
        backend.submit_adjacent(requests)  # type: ignore[attr-defined]
    finally:
        backend.close()
        region.close()
    assert calls == [3, 1, 1, 1]
    if how == "short":
        assert ends == [None, None, None]
    else:
        assert ends[0] is ends[2] is None
        assert isinstance(ends[1], OSError)
        assert ends[1].errno == errno.EIO
