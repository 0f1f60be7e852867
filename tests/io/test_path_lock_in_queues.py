"""Queues whose path other processes use too: reads need the path lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from offload_strategy.io.backends.thread_pool import ThreadPool
from offload_strategy.io.queues import path_lock as path_lock_module
from offload_strategy.io.queues.moves import Move
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.telemetry import Recorder
from offload_strategy.units import PAGE_BYTES
from tests.io.backends import ManualBackend, extent, make_move


class FakePathLock:
    """A path lock that the test grants."""

    works = True
    path = Path("/fake")

    def __init__(self) -> None:
        self.other_processes = 1
        self.grants = threading.Semaphore(0)
        self.requests = threading.Semaphore(0)
        self.held = False
        self.log: list[str] = []

    def others(self) -> int:
        return self.other_processes

    def acquire(self) -> None:
        self.requests.release()
        assert self.grants.acquire(timeout=30)
        self.held = True
        self.log.append("acquired")

    def release(self) -> None:
        self.held = False
        self.log.append("released")


ONCE = ["acquired", "released"]


@pytest.fixture
def lock():
    return FakePathLock()


@pytest.fixture
def backend():
    return ManualBackend(depth=2)


@pytest.fixture
def queue(plain, backend, lock):
    made = PathQueue(plain, backend, Recorder(), path_lock=lock)  # type: ignore[arg-type]
    yield made
    lock.grants.release()  # no thread must wait forever
    made.close()
    assert not lock.held


def move(queue: PathQueue, page: int, pages: int = 1, *, write: bool = False) -> Move:
    priority = Priority.WRITE_BACK if write else Priority.PREFETCH
    made = make_move(queue, extent(page, pages), pages * PAGE_BYTES, write=write, priority=priority)
    made.submit()
    return made


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def grant(lock: FakePathLock, backend: ManualBackend, requests: int) -> None:
    """Grant the lock, and wait until that many requests are in flight."""
    lock.grants.release()
    until(lambda: len(backend.waiting) >= requests)


def test_a_process_that_is_alone_takes_no_lock(queue, backend, lock):
    lock.other_processes = 0
    done = move(queue, 0, 3)
    backend.complete_all()
    assert done.state is MoveState.DONE
    assert lock.log == []


def test_reads_wait_for_the_lock_and_writes_do_not(queue, backend, lock):
    reading = move(queue, 0, 3)
    assert lock.requests.acquire(timeout=20)
    assert not backend.waiting
    writing = move(queue, 5, 3, write=True)
    assert len(backend.waiting) == 2, "as many as the backend takes: no read is in flight"
    backend.complete_all()
    assert writing.state is MoveState.DONE
    assert reading.state is MoveState.QUEUED
    assert lock.log == []
    grant(lock, backend, 2)
    backend.complete_all()
    assert reading.state is MoveState.DONE
    assert lock.log == ONCE
    assert not lock.requests.acquire(blocking=False), "requested once for all blocks"


def test_the_lock_is_released_after_its_bytes_but_not_within_a_move(
    queue, backend, lock, monkeypatch
):
    monkeypatch.setattr(path_lock_module, "BYTES_PER_HOLD", 2 * PAGE_BYTES)
    first, second = move(queue, 0, 4), move(queue, 10)
    grant(lock, backend, 2)
    backend.complete_all()
    assert first.state is MoveState.DONE, "a move that has begun is finished"
    assert second.state is MoveState.QUEUED
    assert lock.log == ONCE
    for _ in range(2):
        assert lock.requests.acquire(timeout=20), "requested again for the rest"
    grant(lock, backend, 1)
    backend.complete_all()
    assert second.state is MoveState.DONE
    assert lock.log == 2 * ONCE


def test_reads_go_on_if_the_other_process_ends_while_the_lock_is_held(
    queue, backend, lock, monkeypatch
):
    monkeypatch.setattr(path_lock_module, "BYTES_PER_HOLD", 2 * PAGE_BYTES)
    moves = [move(queue, 0, 4), move(queue, 10)]
    grant(lock, backend, 2)
    lock.other_processes = 0
    backend.complete_all()
    assert [each.state for each in moves] == [MoveState.DONE, MoveState.DONE]
    assert lock.log == ONCE


def test_a_read_that_is_cancelled_while_it_waits_leaves_the_lock_to_others(queue, backend, lock):
    waiting = move(queue, 0)
    assert lock.requests.acquire(timeout=20)
    waiting.cancel()
    assert waiting.ended.is_set()
    lock.grants.release()
    until(lambda: lock.log == ONCE)
    assert not backend.waiting


def test_a_lock_that_does_not_work_stops_nobody(queue, backend, lock, monkeypatch):
    def refuse():
        raise OSError("no locks available")

    monkeypatch.setattr(lock, "acquire", refuse)
    done = move(queue, 0)
    until(lambda: bool(backend.waiting))
    backend.complete_all()
    assert done.state is MoveState.DONE


def test_a_read_begins_without_the_lock_if_no_thread_can_wait_for_it(queue, backend, monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(ThreadPool, "submit", refuse)
    done = move(queue, 0)
    backend.complete_all()
    assert done.state is MoveState.DONE
