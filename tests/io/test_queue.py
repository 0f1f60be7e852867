from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from offload_strategy.io.backends.protocol import create_backend
from offload_strategy.io.queues.moves import Latch, Move
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Direction, Recorder
from offload_strategy.units import PAGE_BYTES
from tests.io.backends import ManualBackend, extent, make_move, plain_region

PAGES = 64


@pytest.fixture
def region(disk: Path) -> Iterator[Region]:
    made = plain_region(disk, PAGES * PAGE_BYTES)
    made.allocate(PAGES * PAGE_BYTES)
    yield made
    made.close()


@pytest.fixture
def backend() -> ManualBackend:
    return ManualBackend()


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def queue(region: Region, backend: ManualBackend, recorder: Recorder) -> PathQueue:
    return PathQueue(region, backend, recorder)


def order(backend: ManualBackend) -> list[int]:
    """Complete everything; the pages in the order in which they moved."""
    pages = []
    while backend.waiting:
        pages.append(backend.complete().offset // PAGE_BYTES)
    return pages


def test_a_move_is_cut_into_blocks_that_cover_it_once(
    queue: PathQueue, backend: ManualBackend
) -> None:
    move = make_move(queue, extent(3, 5), 4 * PAGE_BYTES + 10)
    move.submit()
    begin, seen = move.parts[0].address, []
    while backend.waiting:
        request = backend.complete()
        seen.append((request.offset, request.address - begin, request.nbytes))
    page = PAGE_BYTES
    assert seen == [
        (3 * page, 0, page),
        (4 * page, page, page),
        (5 * page, 2 * page, page),
        (6 * page, 3 * page, page),
        (7 * page, 4 * page, 10),
    ]
    assert move.state is MoveState.DONE
    assert move.ended.is_set()


def test_a_needed_read_overtakes_prefetches_and_those_overtake_writes(
    queue: PathQueue, backend: ManualBackend
) -> None:
    make_move(queue, extent(0, 3), 3 * PAGE_BYTES).submit()
    make_move(queue, extent(10, 2), 2 * PAGE_BYTES).submit()
    make_move(
        queue, extent(20, 2), 2 * PAGE_BYTES, write=False, priority=Priority.PREFETCH
    ).submit()
    make_move(
        queue, extent(30, 2), 2 * PAGE_BYTES, write=False, priority=Priority.NEEDED_NOW
    ).submit()
    # The blocks that were under way end first; then the most urgent, each in order.
    assert order(backend) == [0, 20, 30, 31, 21, 1, 2, 10, 11]


def test_a_prefetch_that_is_hurried_overtakes_what_is_queued(
    queue: PathQueue, backend: ManualBackend
) -> None:
    make_move(queue, extent(0), PAGE_BYTES).submit()
    first = make_move(queue, extent(10, 2), 2 * PAGE_BYTES, write=False, priority=Priority.PREFETCH)
    second = make_move(
        queue, extent(20, 2), 2 * PAGE_BYTES, write=False, priority=Priority.PREFETCH
    )
    first.submit()
    second.submit()
    second.raise_priority()
    second.raise_priority()
    second.raise_priority(Priority.WRITE_BACK)  # never slower than before
    assert order(backend) == [0, 10, 20, 21, 11]


def test_a_move_may_be_hurried_between_two_of_its_blocks(
    queue: PathQueue, backend: ManualBackend
) -> None:
    slow = make_move(queue, extent(0, 4), 4 * PAGE_BYTES, write=False, priority=Priority.WRITE_BACK)
    slow.submit()
    make_move(
        queue, extent(10, 2), 2 * PAGE_BYTES, write=False, priority=Priority.PREFETCH
    ).submit()
    assert backend.complete().offset == 0
    slow.raise_priority()
    assert order(backend) == [10 * 1, 1, 2, 3, 11]


def test_hurrying_a_move_that_is_over_changes_nothing(
    queue: PathQueue, backend: ManualBackend
) -> None:
    move = make_move(queue, extent(0), PAGE_BYTES)
    move.submit()
    backend.complete_all()
    move.raise_priority()
    assert not backend.waiting
    make_move(queue, extent(1), PAGE_BYTES).submit()
    assert order(backend) == [1]


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_blocks_are_under_way_than_the_backend_can_use(region: Region, depth: int) -> None:
    backend = ManualBackend(depth=depth)
    queue = PathQueue(region, backend, Recorder())
    for index in range(4):
        make_move(queue, extent(4 * index, 4), 4 * PAGE_BYTES).submit()
    while backend.waiting:
        assert len(backend.waiting) <= depth
        backend.complete(at=len(backend.waiting) - 1)  # in any order


def test_a_cancelled_move_that_never_began_ends_at_once(
    queue: PathQueue, backend: ManualBackend, recorder: Recorder
) -> None:
    ended: list[Move] = []
    make_move(queue, extent(0), PAGE_BYTES).submit()
    move = make_move(queue, extent(1), PAGE_BYTES, on_end=ended.append)
    move.submit()
    move.cancel()
    assert ended == [move]
    assert move.ended.is_set()
    assert move.state is MoveState.CANCELLED
    assert order(backend) == [0]
    assert [record.nbytes for record in recorder.moves] == [PAGE_BYTES]
    move.cancel()
    assert ended == [move]


def test_a_cancelled_move_ends_when_its_blocks_under_way_have(
    region: Region, recorder: Recorder
) -> None:
    backend = ManualBackend(depth=2)
    queue = PathQueue(region, backend, recorder)
    ended: list[Move] = []
    move = make_move(queue, extent(0, 5), 5 * PAGE_BYTES, on_end=ended.append)
    move.submit()
    move.cancel()
    assert not ended
    assert not move.ended.is_set()
    backend.complete()
    assert not ended
    backend.complete(error=OSError("too late to matter"))
    assert ended == [move]
    assert move.state is MoveState.CANCELLED
    assert not backend.waiting
    # What was given up does not count as moved.
    assert recorder.client_bytes("activations", "written") == 0
    assert recorder.busy_seconds() > 0


def test_a_move_that_is_over_cannot_be_cancelled(queue: PathQueue, backend: ManualBackend) -> None:
    ended: list[Move] = []
    move = make_move(queue, extent(0), PAGE_BYTES, on_end=ended.append)
    move.submit()
    backend.complete_all()
    move.cancel()
    assert move.state is MoveState.DONE
    assert ended == [move]


def test_after_an_error_no_further_block_of_the_move_begins(
    queue: PathQueue, backend: ManualBackend, recorder: Recorder
) -> None:
    ended: list[Move] = []
    move = make_move(queue, extent(0, 5), 5 * PAGE_BYTES, on_end=ended.append)
    other = make_move(queue, extent(10), PAGE_BYTES)
    move.submit()
    other.submit()
    error = OSError("broken")
    backend.complete()
    backend.complete(error=error)
    assert move.state is MoveState.FAILED
    assert move.error is error
    assert ended == [move]
    assert order(backend) == [10]
    assert other.state is MoveState.DONE
    assert recorder.client_bytes("activations", "written") == PAGE_BYTES


def test_the_first_of_several_errors_is_kept(region: Region) -> None:
    backend = ManualBackend(depth=3)
    queue = PathQueue(region, backend, Recorder())
    move = make_move(queue, extent(0, 3), 3 * PAGE_BYTES)
    move.submit()
    backend.complete(error=OSError("first"), at=1)
    backend.complete(error=OSError("second"), at=1)
    assert not move.ended.is_set()
    backend.complete()
    assert move.ended.is_set()
    assert str(move.error) == "first"


def test_a_backend_that_refuses_a_block_fails_the_move(
    queue: PathQueue, backend: ManualBackend
) -> None:
    backend.close()
    moves = [make_move(queue, extent(index), PAGE_BYTES) for index in range(3)]
    for move in moves:
        move.submit()
    assert [move.state for move in moves] == [MoveState.FAILED] * 3
    assert all(move.ended.is_set() for move in moves)


def test_a_backend_that_dies_fails_a_long_queue_of_moves(
    queue: PathQueue, backend: ManualBackend
) -> None:
    moves = [make_move(queue, extent(0), PAGE_BYTES) for _ in range(3000)]
    for move in moves:
        move.submit()
    backend.closed = True
    backend.complete()  # what was under way ends, and the next is refused, and so on
    assert moves[0].state is MoveState.DONE
    assert {move.state for move in moves[1:]} == {MoveState.FAILED}


def test_a_move_lets_its_memory_go_when_it_ends(queue: PathQueue, backend: ManualBackend) -> None:
    move = make_move(queue, extent(0), PAGE_BYTES)
    reference = weakref.ref(move.keep_alive)
    move.submit()
    backend.complete_all()
    assert reference() is None


def test_the_memory_is_free_when_whoever_waits_is_told(
    queue: PathQueue, backend: ManualBackend
) -> None:
    class Held:
        pass

    held = Held()
    reference = weakref.ref(held)
    found: list[object] = []

    class Told(Latch):
        def set(self) -> None:
            found.append(reference())
            super().set()

    def on_end(move: Move, held: Held) -> None:
        return

    move = make_move(queue, extent(0), PAGE_BYTES, on_end=partial(on_end, held=held))
    del held
    move.ended = Told()
    move.submit()
    backend.complete_all()
    assert found == [None]


def test_every_move_is_recorded_with_its_times(
    queue: PathQueue, backend: ManualBackend, recorder: Recorder
) -> None:
    make_move(queue, extent(0, 2), PAGE_BYTES + 1).submit()
    make_move(queue, extent(4), 10, write=False, priority=Priority.PREFETCH).submit()
    backend.complete_all()
    read, written = sorted(recorder.moves, key=lambda record: record.nbytes)
    assert (read.direction, read.nbytes, read.tier) == (Direction.READ, 10, "nvme")
    assert (written.direction, written.nbytes) == (Direction.WRITE, PAGE_BYTES + 1)
    for record in recorder.moves:
        assert record.queued_at <= record.started_at <= record.finished_at
    assert recorder.client_bytes("activations", "written") == PAGE_BYTES + 1
    assert recorder.tier_bytes("nvme", Direction.READ) == 10


def test_many_threads_may_submit_hurry_and_cancel_at_once(disk: Path) -> None:
    region = Region(disk, "nvme", 4096 * PAGE_BYTES)
    backend = create_backend("posix", threads=3, block_size=PAGE_BYTES)
    recorder = Recorder()
    queue = PathQueue(region, backend, recorder)
    ends: list[Move] = []
    all_moves: list[Move] = []

    def work(seed: int) -> None:
        for index in range(60):
            place = region.allocate(3 * PAGE_BYTES)
            assert place is not None
            move = make_move(
                queue, place, 2 * PAGE_BYTES + 5, write=(seed + index) % 3 != 0, on_end=ends.append
            )
            all_moves.append(move)
            move.submit()
            if index % 4 == 0:
                move.raise_priority()
            if index % 5 == 0:
                move.cancel()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for move in all_moves:
        assert move.ended.wait(60)
    backend.close()
    region.close()
    assert sorted(map(id, ends)) == sorted(map(id, all_moves)), "each ended once"
    done = [move for move in all_moves if move.state is MoveState.DONE]
    moved = {direction: 0 for direction in Direction}
    for move in done:
        moved[move.direction] += move.nbytes
    assert moved == {direction: recorder.tier_bytes("nvme", direction) for direction in Direction}
    assert len(done) >= len(all_moves) * 3 // 4
