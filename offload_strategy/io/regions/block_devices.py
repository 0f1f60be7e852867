"""A raw block device as the path of a tier: opened exclusively, and only if no data is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import struct
import subprocess
import sys
from pathlib import Path

from offload_strategy.errors import ConfigError
from offload_strategy.telemetry import get_logger
from offload_strategy.units import PAGE_BYTES, MiB, format_size

with contextlib.suppress(ImportError):  # Windows, where no tier has a path
    import fcntl

logger = get_logger(__name__)

#: Bytes at the start of a device that are inspected, and never written.
HEAD_BYTES = 1 * MiB

_BLKDISCARD = 0x1277  # linux/fs.h
_BLKSSZGET = 0x1268
_BLKROGET = 0x125E

_READ_ONLY = (
    "the device {path} is read-only. Make it writable (`blockdev --setrw {path}`), or name another."
)


def is_block_device(path: Path) -> bool:
    """Whether a path names a block device, directly or by a symbolic link."""
    with contextlib.suppress(OSError):
        return stat.S_ISBLK(path.stat().st_mode)
    return False


def discard(fd: int, begin: int, nbytes: int) -> None:
    """Discard a part of a device, if the device supports it."""
    if nbytes:
        with contextlib.suppress(OSError):
            fcntl.ioctl(fd, _BLKDISCARD, struct.pack("=QQ", begin, nbytes))


def open_device(path: Path, tier: str, *, overwrite: bool, direct: bool) -> tuple[int, int]:
    """Open a block device exclusively, and check that there is no data on it, unless `overwrite`.

    Returns the descriptor, and how many bytes from `HEAD_BYTES` on may be written, in whole pages.
    With `direct` False, I/O goes through the page cache. Raises ConfigError if it cannot be used.
    """
    where = f"tier {tier!r} (tiers[].path)"
    flags = os.O_RDWR | os.O_EXCL | os.O_NOFOLLOW
    try:
        fd = os.open(path, flags | os.O_DIRECT if direct else flags)
    except OSError as error:
        raise ConfigError(f"{where}: {_open_error(path, error)}") from error
    try:
        if not stat.S_ISBLK(os.fstat(fd).st_mode):
            raise ConfigError(f"{where}: {path} is no longer a block device.")
        if _query(fd, _BLKROGET):  # some can be opened for writing nevertheless
            raise ConfigError(f"{where}: {_READ_ONLY.format(path=path)}")
        size = os.lseek(fd, 0, os.SEEK_END)
        capacity = (size - HEAD_BYTES) // PAGE_BYTES * PAGE_BYTES
        if capacity < PAGE_BYTES:
            raise ConfigError(
                f"{where}: the device {path} has {format_size(size)}, of which the first "
                f"{format_size(HEAD_BYTES)} are never used: nothing is left. Name a larger one."
            )
        sector = _query(fd, _BLKSSZGET)
        if sector > PAGE_BYTES:
            raise ConfigError(
                f"{where}: the device {path} has sectors of {sector} bytes; at most "
                f"{PAGE_BYTES} are supported. Put a file system on it and name a directory there."
            )
        found = _content(path, size, where, overwrite=overwrite)
        if found is not None and not overwrite:
            raise ConfigError(
                f"{where}: the device {path} ({format_size(size)}) has {found} on it, which "
                f"would be lost. Name another device, or, if nobody needs what is there, set "
                f"overwrite: true for this tier or run `wipefs --all {path}`."
            )
        if found is not None:
            logger.warning(f"tier {tier!r}: {path} has {found} on it, which is being overwritten")
    except BaseException:
        os.close(fd)
        raise
    return fd, capacity


def _content(path: Path, size: int, where: str, *, overwrite: bool) -> str | None:
    """Name what is on a device, or None if it looks empty: `wipefs` knows most signatures."""
    try:
        with open(path, "rb") as device:
            head = device.read(HEAD_BYTES)
            device.seek(size - PAGE_BYTES)
            tail = device.read(PAGE_BYTES)
    except OSError as error:
        raise ConfigError(
            f"{where}: the device {path} cannot be read: {error.strerror}. Check the cable and the "
            f"kernel's log (dmesg), or name another."
        ) from error
    # It is not on the path of every user.
    program = shutil.which("wipefs", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
    command = [program or "wipefs", "--no-act", "--parsable", str(path)]
    try:
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        if not overwrite:
            raise ConfigError(
                f"{where}: whether there is data on {path} cannot be checked: {error}. Install "
                f"util-linux, or, if nobody needs what is there, set overwrite: true for this tier."
            ) from error
        listed = ""
    kinds = {line.rpartition(",")[2] for line in listed.splitlines() if not line.startswith("#")}
    # wipefs does not look there if the head is empty.
    if b"EFI PART" in (tail[-512:][:8], tail[:8]):
        kinds.add("gpt")
    if kinds:
        return f"signatures of {', '.join(sorted(kinds))}"
    return "data of an unknown kind" if any(head) else None


def _query(fd: int, request: int) -> int:
    """Return the result of an ioctl that yields an int; 0 if the device does not support it."""
    with contextlib.suppress(OSError):
        return int.from_bytes(fcntl.ioctl(fd, request, bytes(4)), sys.byteorder, signed=True)
    return 0


def _open_error(path: Path, error: OSError) -> str:
    """Explain why a device could not be opened, and what to do."""
    if error.errno == errno.EBUSY:
        return (
            f"the device {path} is in use: it, or a partition of it, is mounted, is swap space, "
            f"belongs to a RAID or volume group, or another process has it. Unmount or release it, "
            f"or name another. Several processes on one machine need a device each: use "
            f"$LOCAL_RANK in the path."
        )
    if error.errno == errno.EROFS:
        return _READ_ONLY.format(path=path)
    if error.errno in (errno.EACCES, errno.EPERM):
        group = "disk"
        with contextlib.suppress(KeyError, OSError, NotImplementedError):
            group = path.group()
        return (
            f"this user may not open the device {path}: {error.strerror}. Add the user to the "
            f"device's group ({group}) with `usermod -aG {group} USER` and log in again, or name a "
            f"directory on a file system."
        )
    return f"the device {path} cannot be opened: {error.strerror}. Name another."
