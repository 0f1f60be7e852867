"""Faults of single calls and threads: odd answers, signals, wrong bytes, threads that end."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.disks import loop_disk
from benchmarks.faults.disk_faults import DISK_BYTES, trained
from benchmarks.faults.making import (
    SECONDS_OF_PATIENCE,
    Change,
    answers,
    flip_bytes,
    kill_worker,
    settled,
    tried,
)
from benchmarks.faults.subject import (
    BEFORE,
    FORWARDED,
    Outcome,
    observed,
    settings,
    threads,
    train,
)
from offload_strategy import OffloadEngine
from offload_strategy.units import PAGE_BYTES, KiB, MiB


# ---------------------------------------------------------------------- odd answers
def short_answers(place: Path) -> Outcome:
    """Every call moves a page at most."""
    return _train_with(place, lambda call, fd, views, at: call(fd, _first(views, 4 * KiB), at))


def odd_answers(place: Path) -> Outcome:
    """Every call moves 1,000 bytes at most, without direct I/O."""
    return _train_with(
        place, lambda call, fd, views, at: call(fd, _first(views, 1000), at), io={"direct": False}
    )


def try_again(place: Path) -> Outcome:
    """Two of three calls answer EAGAIN."""
    asked = itertools.count()

    def change(call: Callable[..., int], fd: int, views: list[memoryview], at: int) -> int:
        if next(asked) % 3:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return call(fd, views, at)

    return _train_with(place, change)


def try_again_for_ever(place: Path) -> Outcome:
    """From the second step on, every call answers EAGAIN."""

    def change(call: Callable[..., int], fd: int, views: list[memoryview], at: int) -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with (
        loop_disk(place, DISK_BYTES) as disk,
        contextlib.ExitStack() as later,
        mock.patch("offload_strategy.io.backends.posix.RETRY_SECONDS", SECONDS_OF_PATIENCE),
        observed(disk.directory) as outcome,
    ):

        def happen(engine: OffloadEngine) -> None:
            settled(engine)
            later.enter_context(answers(change))

        train(OffloadEngine(settings(disk.directory)), outcome, {(1, BEFORE): happen})
    return outcome


def signals(place: Path) -> Outcome:
    """A thousand signals a second, to the main thread and to those that move bytes."""
    received = itertools.count()
    over = threading.Event()

    def send() -> None:
        while not over.wait(0.001):
            for thread in (threading.main_thread(), *threads()):
                with contextlib.suppress(ProcessLookupError):
                    if thread.ident is not None and thread.is_alive():
                        signal.pthread_kill(thread.ident, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, lambda *_: next(received))
    sender = threading.Thread(target=send)
    sender.start()
    try:
        with loop_disk(place, DISK_BYTES) as disk, observed(disk.directory) as outcome:
            train(OffloadEngine(settings(disk.directory)), outcome)
    finally:
        over.set()
        sender.join()
        signal.signal(signal.SIGUSR1, before)
    assert next(received) > 0
    return outcome


def _first(views: list[memoryview], nbytes: int) -> list[memoryview]:
    return [memoryview(views[0])[:nbytes]]


def _train_with(place: Path, change: Change, **sections: Any) -> Outcome:
    with answers(change):
        return trained(place, **sections)


# ---------------------------------------------------------------------- wrong bytes
def flipped_bytes(place: Path, *, checksum: str = "auto") -> Outcome:
    """Bytes change on the disk."""
    with loop_disk(place, 32 * MiB, formatted=False) as disk, observed() as outcome:
        engine = OffloadEngine(settings(disk.device, io={"checksum": checksum}))
        happen = {(1, FORWARDED): lambda engine: flip_bytes(engine, disk.image)}
        train(engine, outcome, happen)
    return outcome


def flipped_bytes_unnoticed(place: Path) -> Outcome:
    """The same without checksums."""
    return flipped_bytes(place, checksum="off")


def lost_writes(place: Path, *, checksum: str = "auto") -> Outcome:
    """The disk says that it has written, and has not: what was there before is still there."""
    return _lying(place, lambda call, fd, views, at: _nbytes(views), checksum)


def lost_writes_unnoticed(place: Path) -> Outcome:
    """The same without checksums."""
    return lost_writes(place, checksum="off")


def torn_writes(place: Path) -> Outcome:
    """The disk writes the first half of the pages of each block only."""

    def half(call: Callable[..., int], fd: int, views: list[memoryview], at: int) -> int:
        if pages := _nbytes(views) // PAGE_BYTES // 2:
            call(fd, _first(views, pages * PAGE_BYTES), at)
        return _nbytes(views)

    return _lying(place, half)


def misdirected_writes(place: Path) -> Outcome:
    """The disk writes each block to the place of the one before."""
    places: list[int] = []

    def elsewhere(call: Callable[..., int], fd: int, views: list[memoryview], at: int) -> int:
        places.append(at)
        return call(fd, views, places[-2:][0])

    return _lying(place, elsewhere)


def _lying(place: Path, write: Change, checksum: str = "auto") -> Outcome:
    """Train on a disk that writes in a way of its own from the second step on."""

    def change(call: Callable[..., int], fd: int, views: list[memoryview], at: int) -> int:
        lies = call.__name__ == "pwritev" and fd in tier  # scratch files are not verified
        return write(call, fd, views, at) if lies else call(fd, views, at)

    tier: set[int] = set()

    def begin(engine: OffloadEngine) -> None:
        settled(engine)
        tier.update(region.fd for region in engine._resources.regions)
        later.enter_context(answers(change))

    with (
        loop_disk(place, DISK_BYTES) as disk,
        contextlib.ExitStack() as later,
        observed(disk.directory) as outcome,
    ):
        io = {"checksum": checksum, "block_size": "1MiB"}
        engine = OffloadEngine(settings(disk.directory, io=io))
        train(engine, outcome, {(1, BEFORE): begin, (1, FORWARDED): settled})
    return outcome


def _nbytes(views: list[memoryview]) -> int:
    return sum(memoryview(view).nbytes for view in views)


# ---------------------------------------------------------------------- threads
def dead_worker(place: Path) -> Outcome:
    """A thread is ended from outside while it writes a block that nobody has read yet."""
    ended: list[threading.Thread] = []

    def change(call: Callable[..., int], fd: int, views: list[memoryview], at: int) -> int:
        if not ended:
            ended.append(threading.current_thread())
            kill_worker(ended[0])
            time.sleep(0.01)  # it is raised at the end of a call
        return call(fd, views, at)

    with (
        loop_disk(place, DISK_BYTES) as disk,
        contextlib.ExitStack() as later,
        observed(disk.directory) as outcome,
    ):
        happen = {
            (1, BEFORE): lambda engine: later.enter_context(answers(change)),
            (1, FORWARDED): tried,
        }
        train(OffloadEngine(settings(disk.directory)), outcome, happen)
    return outcome


def dead_idle_workers(place: Path) -> Outcome:
    """Threads are ended from outside while they wait for work."""

    def happen(engine: OffloadEngine) -> None:
        settled(engine)
        for thread in threads():
            kill_worker(thread)

    return trained(place, lambda disk: {(1, BEFORE): happen})
