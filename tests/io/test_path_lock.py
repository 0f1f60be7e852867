"""Processes that share a path: who is there, whose turn it is, and what a death leaves behind."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload_strategy.io.queues.path_lock import PathLock

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="turns need flock and /proc")

HOLD = """
import sys, time
from pathlib import Path
from offload_strategy.io.queues.path_lock import PathLock
turns = PathLock(Path(sys.argv[1]))
print("there", flush=True)
for line in sys.stdin:
    if line == "take\\n":
        turns.acquire()
    else:
        turns.release()
    print(line.strip(), flush=True)
"""


class Other:
    """Another process on the same path, which does as it is told."""

    def __init__(self, place: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.answer()

    def answer(self) -> str:
        assert self.process.stdout is not None
        poll = select.poll()  # takes any descriptor, unlike select
        poll.register(self.process.stdout, select.POLLIN)
        assert poll.poll(20_000), "the other process does not answer"
        return self.process.stdout.readline().strip()

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        self.process.communicate(timeout=30)


@pytest.fixture
def turns(disk: Path) -> Iterator[PathLock]:
    made = PathLock(disk)
    yield made
    made.close()


@pytest.fixture
def other(disk: Path) -> Iterator[Other]:
    made = Other(disk)
    yield made
    made.end()


def eventually_others(turns: PathLock, count: int) -> None:
    deadline = time.monotonic() + 20
    while turns.others() != count:
        assert time.monotonic() < deadline, f"{turns.others()} others instead of {count}"
        time.sleep(0.02)


def test_alone_there_are_no_others(turns: PathLock, disk: Path) -> None:
    assert turns.works
    again = PathLock(disk)  # another engine of this process is not another process
    assert turns.others() == again.others() == 0
    again.close()


def test_others_are_seen_when_they_come_and_when_they_die(turns: PathLock, disk: Path) -> None:
    assert turns.others() == 0
    first, second = Other(disk), Other(disk)
    eventually_others(turns, 2)
    first.end()
    eventually_others(turns, 1)
    second.end(signal.SIGTERM)
    eventually_others(turns, 0)


def test_processes_on_other_paths_do_not_count(turns: PathLock, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stranger = Other(elsewhere)
    time.sleep(0.6)
    assert turns.others() == 0
    stranger.end()


def take_in_background(turns: PathLock) -> tuple[threading.Thread, threading.Event]:
    got = threading.Event()

    def take() -> None:
        turns.acquire()
        got.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    return thread, got


def test_only_one_process_has_the_turn(turns: PathLock, other: Other) -> None:
    other.tell("take")
    assert other.answer() == "take"
    thread, got = take_in_background(turns)
    assert not got.wait(0.2)
    other.tell("give")
    assert other.answer() == "give"
    assert got.wait(20)
    thread.join(20)
    other.tell("take")  # and the other way round
    time.sleep(0.1)
    turns.release()
    assert other.answer() == "take"


def test_the_turn_of_a_process_that_is_killed_goes_on(turns: PathLock, other: Other) -> None:
    other.tell("take")
    assert other.answer() == "take"
    thread, got = take_in_background(turns)
    assert not got.wait(0.1)
    other.end(signal.SIGKILL)
    assert got.wait(20)
    thread.join(20)
    turns.release()


def test_a_forked_child_does_not_keep_the_turn_of_its_parent(turns: PathLock, disk: Path) -> None:
    turns.acquire()
    begin, end = os.pipe()
    child = os.fork()
    if child == 0:  # a data-loader worker, say, that outlives the turn
        os.close(end)
        os.read(begin, 1)
        os._exit(0)
    os.close(begin)
    # The parent dies without giving back; here: its descriptor goes.
    turns.close()
    late = Other(disk)
    late.tell("take")
    assert late.answer() == "take"
    os.close(end)
    os.waitpid(child, 0)
    late.end()


def test_nothing_lies_on_the_disk(turns: PathLock, other: Other, disk: Path) -> None:
    turns.acquire()
    assert list(disk.iterdir()) == []
    turns.release()


def test_closing_twice_and_giving_back_late_is_harmless(turns: PathLock) -> None:
    turns.acquire()
    turns.close()
    turns.close()
    turns.release()
    assert turns.others() == 0
