"""What a directory is worth as a tier: is it there, may we write, how much room, which kind."""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass
from pathlib import Path

from offload_strategy.config import is_memory_filesystem
from offload_strategy.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DirectoryReport:
    """What `inspect_directory` found.

    Args:
        path: the directory, with symbolic links resolved.
        free_bytes: bytes that the file system offers to this user.
        in_memory: whether it lives in main memory (tmpfs, ramfs).
    """

    path: Path
    free_bytes: int
    in_memory: bool


def own_folder(path: Path) -> Path:
    """Make a folder of this process's own in a directory that other machines use too.

    Args:
        path: the directory.

    Raises:
        ConfigError: it cannot be made.
    """
    rank = os.environ.get("RANK", "0")
    folder = path / f"{platform.node()}-rank{rank}-{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)  # of an earlier process with this number
    except OSError as error:
        raise ConfigError(
            f"tiers[].path: with shared: true each process has a folder of its own, and {folder} "
            f"cannot be made: {error.strerror}. Check the mount and your permissions there."
        ) from error
    return folder


def inspect_directory(path: Path, tier: str) -> DirectoryReport:
    """Check that a directory can hold an ssd tier, without leaving anything in it.

    Args:
        path: the directory that the config names.
        tier: the tier's name, for messages.

    Raises:
        ConfigError: it does not exist, is not a directory, or may not be written.
    """
    where = f"tier {tier!r} (tiers[].path)"
    if not hasattr(os, "pread"):
        raise ConfigError(
            f"{where}: ssd tiers need positioned file I/O, which this system does not offer. "
            f"Use a tier of kind dram."
        )
    try:
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    except OSError as error:  # a directory above it that this user may not enter, a dead mount
        raise ConfigError(
            f"{where}: the directory {str(path)!r} cannot be reached: {error.strerror}. "
            f"Check the mount and the permissions of what lies above it, or name another."
        ) from error
    if nearest != path and path.is_relative_to("/dev"):
        raise ConfigError(
            f"{where}: there is no device {str(path)!r}. `lsblk` lists those that exist."
        )
    if nearest != path:
        raise ConfigError(
            f"{where}: there is no directory {str(path)!r} (the nearest that exists is "
            f"{str(nearest)!r}). Create it with `mkdir -p -m 700 {path}`, or name another."
        )
    if not path.is_dir():
        raise ConfigError(
            f"{where}: {str(path)!r} is not a directory. Name a directory on the disk to use; "
            f"the files in it are made, and removed, by this package."
        )
    if hasattr(os, "statvfs") and os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ConfigError(
            f"{where}: the file system of {str(path)!r} is mounted read-only. Mount it again for "
            f"writing (the system's log tells if an error of the disk made it so), or name another "
            f"directory."
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{where}: the directory {str(path)!r} is not writable for this user. "
            f"Change its owner or mode, or name another."
        )
    resolved = path.resolve()
    return DirectoryReport(
        path=resolved,
        free_bytes=shutil.disk_usage(resolved).free,
        in_memory=is_memory_filesystem(resolved),
    )
