"""Queues that share their path with other processes, turn by turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_strategy.io.queues import path_lock
from offload_strategy.io.queues.moves import Move
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.io.regions.extents import Extent
from offload_strategy.io.regions.region import Region
from offload_strategy.telemetry import Recorder
from offload_strategy.units import PAGE_BYTES
from tests.io.backends import ManualBackend, make_move, plain_region


class FakeTurns:
    """Turns that a test grants."""

    works = True
    path = Path("/fake")

    def __init__(self) -> None:
        self.others_there = 1
        self.grants = threading.Semaphore(0)
        self.asked = threading.Semaphore(0)
        self.held = False
        self.log: list[str] = []

    def others(self) -> int:
        return self.others_there

    def acquire(self) -> None:
        self.asked.release()
        assert self.grants.acquire(timeout=30)
        self.held = True
        self.log.append("turn")

    def release(self) -> None:
        self.held = False
        self.log.append("given back")


@pytest.fixture
def region(disk: Path) -> Iterator[Region]:
    made = plain_region(disk, 64 * PAGE_BYTES)
    made.allocate(64 * PAGE_BYTES)
    yield made
    made.close()


@pytest.fixture
def turns() -> FakeTurns:
    return FakeTurns()


@pytest.fixture
def backend() -> ManualBackend:
    return ManualBackend(depth=2)


@pytest.fixture
def queue(region: Region, backend: ManualBackend, turns: FakeTurns) -> Iterator[PathQueue]:
    made = PathQueue(region, backend, Recorder(), path_lock=turns)  # type: ignore[arg-type]
    yield made
    turns.grants.release()  # nobody must wait for ever
    made.close()
    assert not turns.held


def move(queue: PathQueue, page: int, pages: int = 1, *, write: bool = False) -> Move:
    made = make_move(
        queue,
        Extent(page * PAGE_BYTES, pages * PAGE_BYTES),
        pages * PAGE_BYTES,
        write=write,
        priority=Priority.WRITE_BACK if write else Priority.PREFETCH,
    )
    made.submit()
    return made


def until(backend: ManualBackend, count: int) -> None:
    deadline = time.monotonic() + 20
    while len(backend.waiting) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_alone_no_turn_is_taken(queue: PathQueue, backend: ManualBackend, turns: FakeTurns) -> None:
    turns.others_there = 0
    done = move(queue, 0, 3)
    backend.complete_all()
    assert done.state is MoveState.DONE
    assert turns.log == []


def test_writes_need_no_turn(queue: PathQueue, backend: ManualBackend, turns: FakeTurns) -> None:
    reading = move(queue, 0, 3)
    assert turns.asked.acquire(timeout=20)
    writing = move(queue, 5, 3, write=True)
    assert len(backend.waiting) == 2, "as many as the backend takes: no read is under way"
    backend.complete_all()
    assert writing.state is MoveState.DONE
    assert reading.state is MoveState.QUEUED
    assert turns.log == []
    turns.grants.release()
    until(backend, 2)
    backend.complete_all()
    assert reading.state is MoveState.DONE


def test_a_turn_ends_with_its_reads_though_writes_are_under_way(
    queue: PathQueue, backend: ManualBackend, turns: FakeTurns
) -> None:
    reading = move(queue, 0)
    turns.grants.release()
    until(backend, 1)
    writing = move(queue, 5, 4, write=True)
    backend.complete()
    assert reading.state is MoveState.DONE
    assert turns.log == ["turn", "given back"]
    backend.complete_all()
    assert writing.state is MoveState.DONE


def test_nothing_is_read_before_its_turn(
    queue: PathQueue, backend: ManualBackend, turns: FakeTurns
) -> None:
    waiting = move(queue, 0, 3)
    assert turns.asked.acquire(timeout=20)
    assert not backend.waiting
    assert waiting.state is MoveState.QUEUED
    turns.grants.release()
    until(backend, 2)
    backend.complete_all()
    assert waiting.state is MoveState.DONE
    assert turns.log == ["turn", "given back"]
    assert not turns.asked.acquire(blocking=False), "asked once for a batch of moves"


def test_what_comes_during_a_turn_moves_in_it(
    queue: PathQueue, backend: ManualBackend, turns: FakeTurns
) -> None:
    first = move(queue, 0, 2)
    turns.grants.release()
    until(backend, 2)
    second = move(queue, 5)
    backend.complete_all()
    assert (first.state, second.state) == (MoveState.DONE, MoveState.DONE)
    assert turns.log == ["turn", "given back"]


def test_a_turn_ends_after_its_bytes_but_not_within_a_move(
    queue: PathQueue,
    backend: ManualBackend,
    turns: FakeTurns,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(path_lock, "BYTES_PER_HOLD", 2 * PAGE_BYTES)
    first = move(queue, 0, 4)
    second = move(queue, 10, 1)
    turns.grants.release()
    until(backend, 2)
    while backend.waiting:
        backend.complete()
    assert first.state is MoveState.DONE, "begun moves are finished"
    assert second.state is MoveState.QUEUED
    assert turns.log == ["turn", "given back"]
    assert turns.asked.acquire(timeout=20)
    assert turns.asked.acquire(timeout=20), "asked again for what is left"
    turns.grants.release()
    until(backend, 1)
    backend.complete_all()
    assert second.state is MoveState.DONE
    assert turns.log == ["turn", "given back"] * 2


def test_a_move_that_is_cancelled_while_waiting_leaves_the_turn_to_others(
    queue: PathQueue, backend: ManualBackend, turns: FakeTurns
) -> None:
    gone = move(queue, 0)
    assert turns.asked.acquire(timeout=20)
    gone.cancel()
    assert gone.ended.is_set()
    turns.grants.release()
    deadline = time.monotonic() + 20
    while turns.log != ["turn", "given back"]:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not backend.waiting


def test_going_on_without_when_turns_cannot_be_taken(
    queue: PathQueue, backend: ManualBackend, turns: FakeTurns, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise OSError("no locks available")

    monkeypatch.setattr(turns, "acquire", refuse)
    done = move(queue, 0)
    until(backend, 1)
    backend.complete_all()
    assert done.state is MoveState.DONE
