"""Loop devices: real block devices over files, with a file system or without."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest


def run(*command: str | Path) -> str:
    """Run a command of the system; returns its output, or raises an error that shows it."""
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, f"{command}: {done.stderr}"
    return done.stdout.strip()


def need(*programs: str) -> None:
    """Skip the test where it cannot make what it needs."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("loop devices and mounts need root")
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")


@contextlib.contextmanager
def loop_device(file: Path, nbytes: int = 0, *, read_only: bool = False) -> Iterator[Path]:
    """A block device over a file, which is made if `nbytes` is given."""
    need("losetup")
    if nbytes:
        with open(file, "wb") as made:
            made.truncate(nbytes)
    options = ["--read-only"] if read_only else []
    done = subprocess.run(
        ["losetup", "--find", "--show", *options, str(file)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    if done.returncode != 0:
        pytest.skip(f"this system has no free loop device: {done.stderr.strip()}")
    device = Path(done.stdout.strip())
    try:
        yield device
    finally:
        run("losetup", "--detach", device)
        assert detached(file.resolve()), f"{device} is still attached to {file}"


def detached(place: Path) -> bool:
    """Whether no loop device is left over a file, or over one in a directory.

    A device is detached when the last program closes it, and other programs look at all of them
    now and then: those are waited for.
    """
    deadline = time.monotonic() + 10
    while attached := str(place) in run("losetup", "--list"):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return not attached


@contextlib.contextmanager
def mounted(device: Path, directory: Path) -> Iterator[Path]:
    """A file system that is mounted for a while."""
    need("mount", "umount")
    directory.mkdir(exist_ok=True)
    run("mount", device, directory)
    try:
        yield directory
    finally:
        _unmount(directory)


@contextlib.contextmanager
def tmpfs(directory: Path, nbytes: int) -> Iterator[Path]:
    """A small file system in memory, mounted for a while."""
    need("mount", "umount")
    run("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", directory)
    try:
        yield directory
    finally:
        _unmount(directory)


def _unmount(directory: Path) -> None:
    """Unmount, and fail if something in it is still open; it vanishes when that is closed."""
    done = subprocess.run(
        ["umount", str(directory)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        run("umount", "--lazy", directory)
        raise AssertionError(f"a test left a file open: {done.stderr.strip()}")


@dataclass
class LoopDisk:
    """A loop device: `device`, the `file` behind it, and the `directory` where it is mounted."""

    device: Path
    file: Path
    directory: Path


@contextlib.contextmanager
def loop_disk(folder: Path, nbytes: int, *, sparse: bool = False) -> Iterator[LoopDisk]:
    """An ext4 file system of `nbytes` on a loop device; everything is undone at the end.

    `sparse`: the file behind it allocates its blocks when they are written, and may find none.
    """
    need("mkfs.ext4")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "disk.img"
    with open(file, "wb") as image:
        if sparse:
            image.truncate(nbytes)
        else:
            os.posix_fallocate(image.fileno(), 0, nbytes)
    try:
        with loop_device(file) as device:
            run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0", device)
            with mounted(device, folder / "mount") as directory:
                yield LoopDisk(device, file, directory)
    finally:
        file.unlink()
