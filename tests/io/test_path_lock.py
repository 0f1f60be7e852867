"""Processes that share a path: who holds its lock, and queues whose reads need it."""

import errno
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest

from offload_strategy.io.backends.thread_pool import ThreadPool
from offload_strategy.io.queues import path_lock as path_lock_module
from offload_strategy.io.queues.path_lock import PathLock
from offload_strategy.io.queues.path_queue import PathQueue
from offload_strategy.io.queues.request_queue import MoveState, Priority
from offload_strategy.telemetry import Recorder
from offload_strategy.units import PAGE_BYTES
from tests.io.backends import ManualBackend, submit
from tests.store.rig import meanwhile
from tests.support import raising

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="path locks need flock and /proc")

PROGRAM = """
import sys
from pathlib import Path
from offload_strategy.io.queues.path_lock import PathLock
lock = PathLock(Path(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    getattr(lock, line.strip())()
    print(line.strip(), flush=True)
"""


class Other:
    """Another process that uses the path, and calls its lock's methods when told to."""

    def __init__(self, place):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answers(self, seconds):
        poll = select.poll()  # takes any descriptor, unlike select
        poll.register(self.process.stdout, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def answer(self):
        assert self.answers(60), "the other process does not answer"
        return self.process.stdout.readline().strip()

    def begin(self, method):
        self.process.stdin.write(method + "\n")
        self.process.stdin.flush()

    def call(self, method):
        self.begin(method)
        assert self.answer() == method

    def end(self, how=signal.SIGKILL):
        self.process.send_signal(how)
        self.process.communicate(timeout=30)


def until(holds):
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


# ---------------------------------------------------------------------- the lock
@pytest.fixture
def lock(disk):
    made = PathLock(disk)
    yield made
    made.close()


def test_a_process_alone_sees_no_others_and_may_close_twice_and_release_late(lock, disk):
    assert lock.works
    again = PathLock(disk)  # another engine of this process is not another process
    assert lock.others() == again.others() == 0
    lock.acquire()
    for each in (again, lock, lock):
        each.close()
    lock.release()
    assert lock.others() == 0


def test_a_lock_that_cannot_be_released_is_given_up(disk, monkeypatch):
    flock = fcntl.flock

    def cannot_release(fd, operation):
        if operation == fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, "no locks are available")
        flock(fd, operation)

    with monkeypatch.context() as patch:
        patch.setattr(path_lock_module.fcntl, "flock", cannot_release)
        broken = PathLock(disk)
        assert not broken.works
    other = os.open(disk, os.O_RDONLY)
    flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it
    os.close(other)
    broken.close()


def test_others_are_seen_and_one_process_has_the_lock_until_it_releases_it_or_dies(
    lock, disk, tmp_path
):
    (tmp_path / "elsewhere").mkdir()  # a process of another path does not count
    first, second, elsewhere = (Other(place) for place in (disk, disk, tmp_path / "elsewhere"))
    assert [each.answer() for each in (first, second, elsewhere)] == ["ready"] * 3
    until(lambda: lock.others() == 2)
    first.call("acquire")
    acquired = meanwhile(lock.acquire)
    assert not wait([acquired], 0.1).done
    first.call("release")
    acquired.result(20)
    second.begin("acquire")  # and the other way round
    assert not second.answers(0.1)
    lock.release()
    assert second.answer() == "acquire"
    acquired = meanwhile(lock.acquire)
    assert not wait([acquired], 0.1).done
    second.end(signal.SIGKILL)
    acquired.result(20)
    until(lambda: lock.others() == 1)
    first.end(signal.SIGTERM)
    until(lambda: lock.others() == 0)
    elsewhere.end()


def test_a_forked_child_does_not_keep_the_lock_of_its_parent(lock, disk):
    lock.acquire()
    begin, end = os.pipe()
    child = os.fork()
    if child == 0:  # a data-loader worker, say, that outlives the lock
        os.close(end)
        os.read(begin, 1)
        os._exit(0)
    os.close(begin)
    lock.close()  # as when the parent dies: its descriptor is closed, without a release
    late = Other(disk)
    assert late.answer() == "ready"
    late.call("acquire")
    os.close(end)
    os.waitpid(child, 0)
    late.end()


# ---------------------------------------------------------------------- queues
class FakePathLock:
    works = True
    path = Path("/fake")

    def __init__(self):
        self.other_processes = 1
        self.grants = threading.Semaphore(0)
        self.requests = threading.Semaphore(0)
        self.log: list[str] = []

    def others(self):
        return self.other_processes

    def acquire(self):
        self.requests.release()
        assert self.grants.acquire(timeout=30)
        self.log.append("acquired")

    def release(self):
        self.log.append("released")


ONCE = ["acquired", "released"]
READ = Priority.PREFETCH


@pytest.fixture
def granted():
    return FakePathLock()


@pytest.fixture
def manual():
    return ManualBackend(depth=2)


@pytest.fixture
def queue(plain, manual, granted):
    made = PathQueue(plain, manual, Recorder(), path_lock=granted)
    yield made
    granted.grants.release()  # no thread must wait forever
    made.close()
    assert granted.log[-1:] != ["acquired"], "the lock is still held"


def grant(lock, backend, requests):
    """Grant the lock, wait until that many requests are in flight, and complete them."""
    lock.grants.release()
    until(lambda: len(backend.waiting) >= requests)
    backend.complete_all()


def test_reads_wait_for_the_lock_and_writes_do_not(queue, manual, granted):
    reading = submit(queue, 0, 3, READ)
    assert granted.requests.acquire(timeout=20)
    assert not manual.waiting
    writing = submit(queue, 5, 3)
    assert len(manual.waiting) == 2, "as many as the backend takes: no read is in flight"
    manual.complete_all()
    assert writing.state is MoveState.DONE
    assert reading._parts[0][1].state is MoveState.QUEUED
    assert granted.log == []
    grant(granted, manual, 2)
    assert reading.state is MoveState.DONE
    assert granted.log == ONCE
    assert not granted.requests.acquire(blocking=False), "requested once for all blocks"


@pytest.mark.parametrize("alone", [False, True], ids=["others remain", "the other has ended"])
def test_the_lock_is_released_after_its_bytes_but_not_within_a_move(
    queue, manual, granted, monkeypatch, alone
):
    monkeypatch.setattr(path_lock_module, "BYTES_PER_HOLD", 2 * PAGE_BYTES)
    first, second = submit(queue, 0, 4, READ), submit(queue, 10, 1, READ)
    granted.grants.release()
    until(lambda: len(manual.waiting) == 2)
    granted.other_processes = 0 if alone else 1
    manual.complete_all()
    assert first.state is MoveState.DONE, "a move that has begun is finished"
    assert granted.log == ONCE
    if not alone:
        assert second._parts[0][1].state is MoveState.QUEUED
        for _ in range(2):
            assert granted.requests.acquire(timeout=20), "requested again for the rest"
        grant(granted, manual, 1)
        assert granted.log == 2 * ONCE
    assert second.state is MoveState.DONE


def test_a_read_that_is_cancelled_while_it_waits_leaves_the_lock_to_others(queue, manual, granted):
    waiting = submit(queue, 0, 1, READ)
    assert granted.requests.acquire(timeout=20)
    waiting.cancel()
    assert waiting.ended.is_set()
    granted.grants.release()
    until(lambda: granted.log == ONCE)
    assert not manual.waiting


@pytest.mark.parametrize(
    ("owner", "call", "error"),
    [
        (FakePathLock, "acquire", OSError("no locks available")),
        (ThreadPool, "submit", RuntimeError("can't start new thread")),
    ],
)
def test_a_read_begins_without_a_lock_that_does_not_work_or_that_no_thread_can_wait_for(
    queue, manual, monkeypatch, owner, call, error
):
    monkeypatch.setattr(owner, call, raising(error))
    done = submit(queue, 0, 1, READ)
    until(lambda: bool(manual.waiting))
    manual.complete_all()
    assert done.state is MoveState.DONE
