"""Loop devices: real block devices over files, with a file system or without."""

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import benchmarks.disks
from benchmarks.disks import LoopDisk, why_not


def run(*command: str | Path) -> str:
    """Run a command of the system; returns its output, or raises an error that shows it."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
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
        file.touch()
        os.truncate(file, nbytes)
    command = ["losetup", "--find", "--show", *(["--read-only"] if read_only else []), str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
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
def loop_disk(folder: Path, nbytes: int) -> Iterator[LoopDisk]:
    """An ext4 file system of `nbytes` on a loop device over a file in `folder`."""
    reason = why_not(throttled=False)
    if reason is not None:
        pytest.skip(reason)
    folder.mkdir(parents=True, exist_ok=True)
    with benchmarks.disks.loop_disk(folder, nbytes) as disk:
        yield disk
