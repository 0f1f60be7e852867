"""Faults of a disk, as a single process sees them: full, failing, unmounted, read-only, stalled."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.disks import LoopDisk, loop_disk, throttle
from benchmarks.faults.making import (
    cut,
    fill,
    impatient,
    run,
    settled,
    tried,
)
from benchmarks.faults.subject import (
    BACKWARDED,
    BEFORE,
    FILLER,
    FORWARDED,
    Faults,
    Outcome,
    observed,
    settings,
    train,
)
from offload_strategy import OffloadEngine
from offload_strategy.host_memory.idle_memory import IdleLimit
from offload_strategy.optimizer.overlap.ahead_update import AheadUpdate
from offload_strategy.optimizer.subgroup_update import Updater
from offload_strategy.units import KiB, MiB

#: The package leaves 64 MiB of a file system to others.
DISK_BYTES = 160 * MiB


def trained(
    place: Path,
    happen: Callable[[LoopDisk], Faults] = lambda disk: {},
    before: Callable[[LoopDisk], object] = lambda disk: None,
    **sections: Any,
) -> Outcome:
    """Train on a disk of its own, to which something happens before the start or meanwhile."""
    with loop_disk(place, DISK_BYTES) as disk, observed(disk.directory) as outcome:
        before(disk)
        train(OffloadEngine(settings(disk.directory, **sections)), outcome, happen(disk))
    return outcome


# ---------------------------------------------------------------------- no room
def too_large_a_capacity(place: Path) -> Outcome:
    """The config asks for more than the disk has."""
    return trained(place, capacity="1GiB")


def full_at_start(place: Path) -> Outcome:
    """The config names no capacity, and next to nothing is free."""
    return trained(place, before=lambda disk: fill(disk, leave=1 * MiB), capacity=None)


def filled_while_running(place: Path, *, second_tier: bool = False) -> Outcome:
    """Somebody else fills the disk after the first step, before all of the capacity is taken."""
    with contextlib.ExitStack() as stack:
        disks = [stack.enter_context(loop_disk(place, DISK_BYTES)) for _ in range(1 + second_tier)]
        # Otherwise the whole of this small capacity would be taken with the first ticket.
        stack.enter_context(mock.patch("offload_strategy.io.regions.region.GROWTH_BYTES", 64 * KiB))
        paths = [disk.directory for disk in disks]
        with observed(*paths) as outcome:
            engine = OffloadEngine(settings(*paths))
            train(engine, outcome, {(0, FORWARDED): lambda engine: fill(disks[0])})
    return outcome


def filled_with_a_second_tier(place: Path) -> Outcome:
    """The same, and there is a second disk."""
    return filled_while_running(place, second_tier=True)


def filled_without_preallocation(place: Path) -> Outcome:
    """The file system cannot preallocate, and is full when a block is written: a real ENOSPC."""

    def refused(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    with loop_disk(place, DISK_BYTES) as disk, observed(disk.directory) as outcome:
        engine = OffloadEngine(settings(disk.directory))

        def happen(engine: OffloadEngine) -> None:
            fill(disk)

        with mock.patch("offload_strategy.io.regions.region.os.posix_fallocate", refused):
            (region,) = engine._resources.regions
            extent = region.allocate(4 * KiB)
            assert extent is not None
            region.free(extent)
        train(engine, outcome, {(0, BEFORE): happen, (0, FORWARDED): tried})
    return outcome


# ---------------------------------------------------------------------- a disk that fails
def write_error(place: Path) -> Outcome:
    """Writes fail from the second step on; the states, which would be read, are elsewhere."""
    return trained(
        place,
        lambda disk: {(1, BEFORE): lambda engine: cut(disk, engine), (1, FORWARDED): tried},
        optimizer={"enabled": False},
    )


def read_error(place: Path) -> Outcome:
    """Reads fail between forward and backward."""
    return trained(place, lambda disk: {(1, FORWARDED): lambda engine: cut(disk, engine)})


def read_error_in_step(place: Path) -> Outcome:
    """Reads fail while `step()` makes visible what ran ahead: a part of it is, the rest is lost."""
    commit = Updater.commit
    with loop_disk(place, DISK_BYTES) as disk, observed(disk.directory) as outcome:
        # New weights do not fit into host memory, and wait for `step()` on the disk.
        engine = OffloadEngine(settings(disk.directory, optimizer={"subgroup_size": 5_000}))

        def commit_and_fail(updater: Updater, ahead_update: AheadUpdate) -> bool:
            held = commit(updater, ahead_update)
            if disk.image.stat().st_size:
                cut(disk)
            return held

        with contextlib.ExitStack() as later:

            def happen(engine: OffloadEngine) -> None:
                settled(engine)
                later.enter_context(mock.patch.object(Updater, "commit", commit_and_fail))

            later.enter_context(mock.patch.object(IdleLimit, "has_room", return_value=False))
            train(engine, outcome, {(1, BACKWARDED): happen})
    return outcome


def failed_before_start(place: Path) -> Outcome:
    """The disk fails before the engine starts, its file system is still mounted."""
    return trained(place, before=cut)


# ---------------------------------------------------------------------- mounts
def unmounted_while_running(place: Path) -> Outcome:
    """Somebody detaches the file system (``umount -l``)."""
    return trained(
        place, lambda disk: {(1, FORWARDED): lambda engine: run("umount", "-l", disk.directory)}
    )


def not_there_at_start(place: Path) -> Outcome:
    """The file system was unmounted, and its mount point removed, before the start."""

    def remove(disk: LoopDisk) -> None:
        disk.unmount()
        disk.directory.rmdir()

    return trained(place, before=remove)


def read_only_at_start(place: Path) -> Outcome:
    """The file system is mounted read-only."""
    return trained(place, before=lambda disk: disk.mount("remount", "ro"))


def read_only_while_running(place: Path) -> Outcome:
    """The kernel finds an error in the file system and makes it read-only."""
    with loop_disk(place, DISK_BYTES) as disk, observed(disk.directory) as outcome:
        disk.mount("remount", "errors=remount-ro")
        trigger = Path("/sys/fs/ext4", disk.device.name, "trigger_fs_error")

        def happen(engine: OffloadEngine) -> None:
            trigger.write_text("tried")
            try:
                (disk.directory / FILLER).touch()
            except OSError as error:
                if error.errno == errno.EROFS:
                    return
            raise AssertionError("the kernel did not make the file system read-only")

        engine = OffloadEngine(settings(disk.directory))
        train(engine, outcome, {(1, BEFORE): happen, (1, FORWARDED): tried})
    return outcome


def remounted_while_running(place: Path) -> Outcome:
    """Somebody asks for a read-only mount of the file system: the kernel refuses, it is in use."""

    def remount(disk: LoopDisk) -> None:
        with contextlib.suppress(RuntimeError):
            disk.mount("remount", "ro")
            raise AssertionError("the mount is not in use")

    return trained(place, lambda disk: {(1, BEFORE): lambda engine: remount(disk)})


def read_only_device(place: Path) -> Outcome:
    """A raw block device is made read-only (``blockdev --setro``)."""
    with loop_disk(place, 32 * MiB, formatted=False) as disk, contextlib.ExitStack() as undo:

        def happen(engine: OffloadEngine) -> None:
            undo.callback(run, "blockdev", "--setrw", disk.device)  # it outlives the disk
            run("blockdev", "--setro", disk.device)

        with observed() as outcome:
            engine = OffloadEngine(settings(disk.device))
            train(engine, outcome, {(1, BEFORE): happen, (1, FORWARDED): tried})
    return outcome


def deleted_directory(place: Path) -> Outcome:
    """The disk's owner removes the directory."""
    with loop_disk(place, DISK_BYTES) as disk:
        directory = disk.directory / "offload"
        directory.mkdir()
        with observed(disk.directory) as outcome:
            happen = {(1, FORWARDED): lambda engine: shutil.rmtree(directory)}
            train(OffloadEngine(settings(directory)), outcome, happen)
    return outcome


# ---------------------------------------------------------------------- a disk that stalls
def stalled(place: Path) -> Outcome:
    """The disk moves 64 KiB a second, until that was reported."""
    return _while_stalled(place)


def _while_stalled(place: Path, act: Callable[[], None] | None = None, **options: bool) -> Outcome:
    """Train while the disk is slow; once that is reported something is done, or it is lifted."""
    with (
        _slow(place) as (disk, slow, lift),
        observed(disk.directory) as outcome,
        impatient(),
        _once_reported(outcome, act or lift) as begin,
    ):

        def happen(engine: OffloadEngine) -> None:
            settled(engine)
            slow()
            begin()

        engine = OffloadEngine(settings(disk.directory))
        train(engine, outcome, {(1, BEFORE): happen}, **options)
    return outcome


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C is heard, also by a process in the background, which inherits that it is ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def interrupted_while_stalled(place: Path) -> Outcome:
    """Ctrl-C, and `engine.close()`, while the disk moves 64 KiB a second."""
    with _interruptible():
        press = functools.partial(os.kill, os.getpid(), signal.SIGINT)
        return _while_stalled(place, press, states_too=False)


@contextlib.contextmanager
def _once_reported(outcome: Outcome, act: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """Once begun, something is done half a second after the first line of the log."""
    over = threading.Event()

    def watch() -> None:
        while not outcome.log:
            if over.wait(0.02):
                return
        if not over.wait(0.5):
            act()

    thread = threading.Thread(target=watch)
    try:
        yield thread.start
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


@contextlib.contextmanager
def _slow(place: Path) -> Iterator[tuple[LoopDisk, Callable[[], None], Callable[[], None]]]:
    """A disk, what makes it slow, and what lifts that again."""
    with loop_disk(place, DISK_BYTES) as disk, throttle() as limits, limits.entered():
        yield (
            disk,
            lambda: limits.limit(disk, read=64 * KiB, write=64 * KiB),
            lambda: limits.limit(disk),
        )
