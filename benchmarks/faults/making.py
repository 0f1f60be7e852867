"""What makes faults: of a disk, of system calls, and of threads."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from benchmarks.disks import LoopDisk
from benchmarks.faults.subject import FILLER
from offload_strategy import OffloadEngine
from offload_strategy.errors import StorageError
from offload_strategy.units import KiB

SECONDS_OF_PATIENCE = 0.6

Change = Callable[[Callable[..., int], int, list[memoryview], int], int]
"""Stands for `os.preadv` or `os.pwritev`, which is its first argument."""


def fill(disk: LoopDisk, leave: int = 0) -> None:
    """Somebody else takes what is free on a disk."""
    with open(disk.directory / FILLER, "wb") as file:
        for too_much in itertools.count(leave, 256 * KiB):
            free = shutil.disk_usage(disk.directory).free - too_much
            if free <= 0:
                return
            with contextlib.suppress(OSError):  # some of what is free is for the file's own blocks
                os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, free)
                return


def cut(disk: LoopDisk, engine: OffloadEngine | None = None) -> None:
    """The disk loses all that is on it, when it is on it: reads and writes fail with EIO."""
    if engine is not None:
        settled(engine)
    os.truncate(disk.image, 0)
    run("losetup", "--set-capacity", disk.device)


def settled(engine: OffloadEngine) -> None:
    """Wait until all that left is on the disk, and only there."""
    engine._resources.store.wait_for_writes()


def tried(engine: OffloadEngine) -> None:
    """Wait until all that left was written, or failed; a write nobody needs any more is given up.

    Training has to notice by itself.
    """
    with contextlib.suppress(StorageError):
        settled(engine)


def flip_bytes(engine: OffloadEngine, image: Path) -> None:
    """Change one byte of every block of what is stored, in the file that is the disk."""
    settled(engine)
    (region,) = engine._resources.regions
    assert region._begin > 0, "offsets are those of the image on a raw device only"
    with open(image, "r+b") as file:
        for place in range(region._begin, region._begin + region._used_end, 4 * KiB):
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())


def kill_worker(thread: threading.Thread, reason: type[BaseException] = SystemExit) -> None:
    """Have an exception raised in a thread, whatever it does."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(reason)
    )


@contextlib.contextmanager
def impatient() -> Iterator[None]:
    """A wait is reported soon."""
    with mock.patch("offload_strategy.store.error_messages.PATIENCE_SECONDS", SECONDS_OF_PATIENCE):
        yield


@contextlib.contextmanager
def answers(change: Change) -> Iterator[None]:
    """System calls that move bytes answer as `change` says, which may make the call itself."""
    with contextlib.ExitStack() as undo:
        for name in ("preadv", "pwritev"):
            call = getattr(os, name)

            def changed(
                fd: int, views: list[memoryview], offset: int, call: Callable[..., int] = call
            ) -> int:
                if fd not in _unnamed():
                    return call(fd, views, offset)
                return change(call, fd, views, offset)

            undo.enter_context(mock.patch.object(os, name, changed))
        yield


def _unnamed() -> set[int]:
    """Descriptors of the package's files."""
    found = set()
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").endswith("(deleted)"):
                found.add(int(entry))
    return found


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
