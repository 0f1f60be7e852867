"""Loop devices: real block devices over files, for tests that may make them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def run(*command: str | Path) -> str:
    """Run a command of the system; its output, or an error that shows it."""
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


@contextmanager
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
        pytest.skip(f"this system gives no loop device: {done.stderr.strip()}")
    device = Path(done.stdout.strip())
    try:
        yield device
    finally:
        run("losetup", "--detach", device)
        assert detached(file.resolve()), f"{device} is still attached to {file}"


def detached(place: Path) -> bool:
    """Whether no loop device is left over a file, or over one in a folder.

    Devices are detached when the last program closes them, and others look at all of them now and
    then: those are waited for.
    """
    deadline = time.monotonic() + 10
    while attached := str(place) in run("losetup", "--list"):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    return not attached


@contextmanager
def mounted(device: Path, directory: Path) -> Iterator[Path]:
    """A file system that is mounted for a while."""
    need("mount", "umount")
    directory.mkdir(exist_ok=True)
    run("mount", device, directory)
    try:
        yield directory
    finally:
        _unmount(directory)


@contextmanager
def tmpfs(directory: Path, nbytes: int) -> Iterator[Path]:
    """A small file system in memory, mounted for a while."""
    need("mount", "umount")
    run("mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", directory)
    try:
        yield directory
    finally:
        _unmount(directory)


def _unmount(directory: Path) -> None:
    """Unmount, and complain if something in it was still open; it vanishes when that is closed."""
    done = subprocess.run(
        ["umount", str(directory)], capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode != 0:
        run("umount", "--lazy", directory)
        raise AssertionError(f"a test left a file open: {done.stderr.strip()}")
