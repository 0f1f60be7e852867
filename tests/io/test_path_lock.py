"""Processes that share a path: who uses it, who holds the lock, and what a killed one leaves."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from offload_strategy.io.queues.path_lock import PathLock

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

    def __init__(self, place: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.answer() == "ready"

    def answers(self, seconds: float) -> bool:
        assert self.process.stdout is not None
        poll = select.poll()  # takes any descriptor, unlike select
        poll.register(self.process.stdout, select.POLLIN)
        return bool(poll.poll(1000 * seconds))

    def answer(self) -> str:
        assert self.answers(60), "the other process does not answer"
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def begin(self, method: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(method + "\n")
        self.process.stdin.flush()

    def call(self, method: str) -> None:
        self.begin(method)
        assert self.answer() == method

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.communicate(timeout=30)


@pytest.fixture
def lock(disk):
    made = PathLock(disk)
    yield made
    made.close()


@pytest.fixture
def other(disk):
    made = Other(disk)
    yield made
    made.end()


def wait_for_others(lock: PathLock, count: int) -> None:
    deadline = time.monotonic() + 20
    while lock.others() != count:
        assert time.monotonic() < deadline, f"{lock.others()} others instead of {count}"
        time.sleep(0.02)


def acquire_in_background(lock: PathLock) -> threading.Event:
    acquired = threading.Event()

    def acquire() -> None:
        lock.acquire()
        acquired.set()

    threading.Thread(target=acquire, daemon=True).start()
    return acquired


def test_a_process_alone_sees_no_others_and_may_close_twice_and_release_late(lock, disk):
    assert lock.works
    again = PathLock(disk)  # another engine of this process is not another process
    assert lock.others() == again.others() == 0
    lock.acquire()
    for each in (again, lock, lock):
        each.close()
    lock.release()
    assert lock.others() == 0


def test_others_are_seen_when_they_start_and_when_they_end(lock, disk, tmp_path):
    assert lock.others() == 0
    (tmp_path / "elsewhere").mkdir()
    elsewhere = Other(tmp_path / "elsewhere")  # of another path: it does not count
    first, second = Other(disk), Other(disk)
    wait_for_others(lock, 2)
    first.end()
    wait_for_others(lock, 1)
    second.end(signal.SIGTERM)
    wait_for_others(lock, 0)
    elsewhere.end()


@pytest.mark.parametrize("end", ["release", "kill"])
def test_only_one_process_holds_the_lock_until_it_releases_it_or_is_killed(lock, other, end):
    other.call("acquire")
    acquired = acquire_in_background(lock)
    assert not acquired.wait(0.1)
    if end == "kill":
        other.end(signal.SIGKILL)
        assert acquired.wait(20)
        return
    other.call("release")
    assert acquired.wait(20)
    other.begin("acquire")  # and the other way round
    assert not other.answers(0.1)
    lock.release()
    assert other.answer() == "acquire"


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
    late.call("acquire")
    os.close(end)
    os.waitpid(child, 0)
    late.end()
