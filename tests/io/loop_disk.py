"""Disks for tests: loop devices, with a file system or without, as slow as wanted."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

THROTTLES = Path("/sys/fs/cgroup/blkio")


@dataclass
class LoopDisk:
    """A loop device: `device`, the `file` behind it, and the `directory` it is mounted at."""

    device: Path
    file: Path
    directory: Path | None = None

    def throttle(self, *, read: int = 0, write: int = 0) -> None:
        """Limit the bytes per second of direct I/O; 0 takes a limit away."""
        number = os.stat(self.device).st_rdev
        for name, limit in (("read", read), ("write", write)):
            control = THROTTLES / f"blkio.throttle.{name}_bps_device"
            control.write_text(f"{os.major(number)}:{os.minor(number)} {limit}\n")


def _need(*programs: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("making a loop device needs root")
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"this system has no {program}")


@contextlib.contextmanager
def loop_disk(
    folder: Path, nbytes: int, *, mounted: bool = True, sparse: bool = False
) -> Iterator[LoopDisk]:
    """A disk of `nbytes`; everything is undone at the end.

    `sparse`: the file behind it takes room when it is written, and may find that there is none.
    """
    _need("losetup", *(("mkfs.ext4", "mount", "umount") if mounted else ()))
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        file = folder / "disk.img"
        with open(file, "wb") as image:
            undo.callback(file.unlink)
            if sparse:
                image.truncate(nbytes)
            else:
                os.posix_fallocate(image.fileno(), 0, nbytes)
        made = subprocess.run(
            ["losetup", "--find", "--show", str(file)], capture_output=True, text=True
        )
        if made.returncode:
            pytest.skip(f"no loop device to be had: {made.stderr.strip()}")
        disk = LoopDisk(Path(made.stdout.strip()), file)
        undo.callback(_run, "losetup", "--detach", str(disk.device))
        if mounted:
            _run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0", str(disk.device))
            disk.directory = folder / "mount"
            disk.directory.mkdir()
            undo.callback(disk.directory.rmdir)
            _run("mount", str(disk.device), str(disk.directory))
            undo.callback(_run, "umount", "--lazy", str(disk.directory))
        if THROTTLES.is_dir():
            undo.callback(disk.throttle)
        yield disk


@contextlib.contextmanager
def slow_disk(folder: Path, nbytes: int, bytes_per_second: int) -> Iterator[LoopDisk]:
    """A mounted disk that reads and writes no faster than `bytes_per_second`."""
    if not (THROTTLES / "blkio.throttle.read_bps_device").exists():
        pytest.skip("this system has no throttles of cgroup v1")
    with loop_disk(folder, nbytes) as disk:
        disk.throttle(read=bytes_per_second, write=bytes_per_second)
        yield disk


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=60)
