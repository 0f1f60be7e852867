"""Slow, small and failing disks on one Linux machine: loop devices, ext4 and the I/O throttle.

    with loop_disk(folder, 1 << 30) as disk, throttle() as limits:
        limits.limit(disk, read=300_000_000, write=300_000_000)
        with limits.entered():
            ...  # direct I/O of this process under disk.directory is throttled

Needs root, and the block-I/O controller of cgroup version 1, as `why_not` tells. Everything is
undone when a `with` ends, however it ends. The benchmarks and the tests of faults share this file.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_BLKIO = Path("/sys/fs/cgroup/blkio")
_TOOLS = ("losetup", "mkfs.ext4", "mount", "umount")
#: How long a file system that is still in use is waited for before it is detached all the same.
_UNMOUNT_SECONDS = 5.0


def why_not(*, throttled: bool = True) -> str | None:
    """Why such disks cannot be had here, or None if they can.

    Args:
        throttled: whether they must be slowed down as well.
    """
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "loop devices need root"
    missing = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not found"
    if not Path("/dev/loop-control").exists():
        return "this kernel has no loop devices"
    if throttled and not (_BLKIO / "cgroup.procs").exists():
        return f"there is no block-I/O controller of cgroup version 1 at {_BLKIO}"
    return None


@dataclass(frozen=True)
class LoopDisk:
    """A block device whose bytes are in a file.

    Args:
        image: the file. Truncating it makes the rest of the disk fail with EIO.
        device: the block device.
        directory: where its file system is mounted; does not exist for a raw device.
    """

    image: Path
    device: Path
    directory: Path

    @property
    def number(self) -> str:
        """Major and minor number, as the throttle names the device."""
        return Path("/sys/block", self.device.name, "dev").read_text().strip()

    def mount(self, *options: str) -> None:
        """Mount the file system, or mount it again with other options ("remount", "ro")."""
        self.directory.mkdir(mode=0o700, exist_ok=True)
        arguments = ["-o", ",".join(options)] if options else []
        _run("mount", *arguments, str(self.device), str(self.directory))

    def unmount(self, *, patience: float = _UNMOUNT_SECONDS) -> None:
        """Unmount the file system; one that stays busy for `patience` seconds is detached."""
        deadline = time.monotonic() + patience
        while os.path.ismount(self.directory):
            try:
                _run("umount", *(["-l"] if time.monotonic() > deadline else []), self.directory)
            except RuntimeError:
                if time.monotonic() > deadline + patience:
                    raise
                time.sleep(0.05)


@contextlib.contextmanager
def loop_disk(folder: Path, nbytes: int, *, formatted: bool = True) -> Iterator[LoopDisk]:
    """A disk of `nbytes` behind a file in `folder`, with ext4 mounted on it.

    Args:
        folder: on the disk that really holds the bytes.
        nbytes: size of the disk; the file system takes some percent of it for itself.
        formatted: False for a raw block device without a file system.
    """
    with contextlib.ExitStack() as undo:
        place = Path(tempfile.mkdtemp(prefix="loop-disk-", dir=folder))
        undo.callback(shutil.rmtree, place, ignore_errors=True)
        image = place / "image"
        with open(image, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        # Direct I/O below as well, or the page cache would be the disk.
        device = Path(_run("losetup", "--find", "--show", "--direct-io=on", image))
        undo.callback(_run, "losetup", "--detach", device)
        disk = LoopDisk(image, device, place / "mounted")
        if formatted:
            at_once = "lazy_itable_init=0,lazy_journal_init=0"  # nothing is written later on
            _run("mkfs.ext4", "-q", "-m", "0", "-E", at_once, device)
            undo.callback(disk.unmount)
            disk.mount()
        yield disk


class Throttle:
    """A group of processes whose I/O on some disks is limited. Made by `throttle`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def limit(self, disk: LoopDisk, *, read: int = 0, write: int = 0) -> None:
        """Limit a disk from now on, in bytes per second; 0 lifts the limit."""
        for direction, limit in (("read", read), ("write", write)):
            file = self.folder / f"blkio.throttle.{direction}_bps_device"
            file.write_text(f"{disk.number} {limit}")

    def add(self, pid: int) -> None:
        """Put a process into the group; what it starts from now on is in it, too."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """This process, and what it starts, are in the group."""
        before = _blkio_group()
        self.add(os.getpid())
        try:
            yield
        finally:
            (before / "cgroup.procs").write_text(str(os.getpid()))

    def _dissolve(self) -> None:
        deadline = time.monotonic() + _UNMOUNT_SECONDS
        while self.folder.exists():
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):  # it ended meanwhile
                    (_BLKIO / "cgroup.procs").write_text(pid)
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


@contextlib.contextmanager
def throttle() -> Iterator[Throttle]:
    """A new group without limits; its processes are let out at the end."""
    group = Throttle(Path(tempfile.mkdtemp(prefix="offload-throttle-", dir=_BLKIO)))
    try:
        yield group
    finally:
        group._dissolve()


def _blkio_group() -> Path:
    """The block-I/O group that this process is in."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(","):
            return _BLKIO / path.lstrip("/")
    return _BLKIO


def _run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return done.stdout.strip()
