"""Checks of the paths that a config names: is a directory usable, and do all capacities fit."""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from offload_strategy.config.directories import local_processes
from offload_strategy.errors import ConfigError
from offload_strategy.units import MiB, format_size

#: Kept free on a file system: neither the default capacity nor growth uses it.
RESERVE_BYTES = 64 * MiB


def make_process_directory(path: Path) -> Path:
    """Create a directory for this process in one that other machines use too."""
    rank = os.environ.get("RANK", "0")
    folder = path / f"{platform.node()}-rank{rank}-{os.getpid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)  # of an earlier process with this number
    except OSError as error:
        raise ConfigError(
            f"tiers[].path: with shared: true each process has its own directory, and {folder} "
            f"cannot be created: {error.strerror}. Check the mount and your permissions there."
        ) from error
    return folder


def check_directory(path: Path, tier: str) -> Path:
    """Return a directory for an ssd tier, resolved; ConfigError if it cannot be written."""
    where = f"tier {tier!r} (tiers[].path)"
    if not hasattr(os, "pread"):
        raise ConfigError(
            f"{where}: ssd tiers need positioned file I/O, which this system does not offer. "
            f"Use a tier of kind dram."
        )
    try:
        nearest = next(place for place in (path, *path.absolute().parents) if place.exists())
    except OSError as error:  # a parent that this user may not enter, a dead mount
        raise ConfigError(
            f"{where}: the directory {str(path)!r} cannot be reached: {error.strerror}. "
            f"Check the mount and the permissions of its parents, or name another."
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
            f"this package creates and removes its own files there."
        )
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        raise ConfigError(
            f"{where}: the file system of {str(path)!r} is mounted read-only. Remount it for "
            f"writing (the system's log shows whether a disk error made it so), or name another "
            f"directory."
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{where}: the directory {str(path)!r} is not writable for this user. "
            f"Change its owner or mode, or name another."
        )
    if risk := _of_others(path):
        raise ConfigError(
            f"{where}: the directory {str(path)!r} {risk}, and could exchange what this run uses "
            f"there. Make one that is yours alone, `mkdir -m 700 {path.resolve() / 'offload'}`, "
            f"and name that."
        )
    return path.resolve()


def _of_others(path: Path) -> str | None:
    """Say how users other than this one and root control a directory; None if they do not."""
    trusted = (os.geteuid(), 0)
    link, status = path.lstat(), path.stat()
    if stat.S_ISLNK(link.st_mode) and link.st_uid not in trusted:
        return f"is reached by a symbolic link of another user ({link.st_uid}), who can change it"
    if status.st_uid not in trusted:
        return f"belongs to another user ({status.st_uid}), who can rename and delete in it"
    # Where each user has a group of their own, new directories are often writable for it.
    writers = stat.S_IWOTH | (stat.S_IWGRP if status.st_gid != os.getegid() else 0)
    if status.st_mode & writers and not status.st_mode & stat.S_ISVTX:
        who = "everybody" if status.st_mode & stat.S_IWOTH else f"its group ({status.st_gid})"
        return f"is writable for {who} without the sticky bit, so that others can rename in it"
    return None


def check_capacities(
    tiers: Sequence[tuple[str, Path, int | None]], processes: int | None = None
) -> None:
    """Check that the tiers on one file system fit together, for all processes of this machine.

    Opening a region checks each tier alone. `tiers` has for each path of an ssd tier the tier's
    name, the path, and the bytes that it may take there, or None for what is free. `processes` is
    their number, or None for what their launcher says.

    Raises:
        ConfigError: they do not fit, or two tiers name the same block device.
    """
    places: dict[tuple[bool, int], list[tuple[str, Path, int | None]]] = defaultdict(list)
    for name, path, capacity in tiers:
        with suppress(OSError):  # opening its region says more
            status, is_device = path.stat(), path.is_block_device()
            number = status.st_rdev if is_device else status.st_dev
            places[is_device, number].append((name, path, capacity))
    for (is_device, number), here in places.items():
        if not is_device:
            with suppress(OSError):  # opening its region says more
                _check_file_system(number, here, processes or local_processes())
        elif len(here) > 1:
            raise ConfigError(
                f"tiers {here[0][0]!r} and {here[1][0]!r} (tiers[].path) are the same block device "
                f"({here[0][1].resolve()}), which can hold only one. Name a device for each."
            )


def _check_file_system(number: int, here: list[tuple[str, Path, int | None]], started: int) -> None:
    asked = [
        (name, capacity, _processes_on(number, path, started))
        for name, path, capacity in here
        if capacity is not None
    ]
    processes = max((count for _, _, count in asked), default=1)
    if len(asked) < 2 and processes == 1:
        return  # opening its region says more
    wanted = sum(capacity * count for _, capacity, count in asked)
    place = here[0][1]
    free = shutil.disk_usage(place).free
    usable = max(0, free - RESERVE_BYTES)
    if wanted <= usable:
        return
    parts = " + ".join(
        f"{name!r} {format_size(capacity)}" + (f" × {count} processes" if count > 1 else "")
        for name, capacity, count in asked
    )
    advice = f"lower them to {format_size(usable // processes)} together"
    if processes > 1:
        advice += (
            f" for each of the {processes} processes, or give each process its "
            f"own disk with $LOCAL_RANK in the path"
        )
    raise ConfigError(
        f"tiers[].capacity: {parts} = {format_size(wanted)}, but the file system of {place} has "
        f"only {format_size(usable)} available ({format_size(free)} free, less a reserve of "
        f"{format_size(RESERVE_BYTES)}). Free some space, {advice}, or name a directory on another "
        f"disk for one of them."
    )


def _processes_on(number: int, path: Path, started: int) -> int:
    """Return how many processes of this machine have the same tier on a file system.

    If $LOCAL_RANK is part of the path, their paths follow from ours: our rank, where it appears,
    becomes theirs. All processes share a path without our rank.
    """
    rank, text = os.environ.get("LOCAL_RANK", ""), str(path)
    if started == 1 or not rank.isdecimal():
        return started
    as_rank = re.compile(rf"(?<!\d){int(rank)}(?!\d)")
    places = [match.span() for match in as_rank.finditer(text)]

    def is_elsewhere(other: int) -> bool:
        # Any of the numbers may be the rank, or all of them.
        names = [f"{text[:begin]}{other}{text[end:]}" for begin, end in places]
        for name in (*names, as_rank.sub(str(other), text)):
            with suppress(OSError):
                if os.stat(name).st_dev != number:
                    return True
        return False

    return sum(other == int(rank) or not is_elsewhere(other) for other in range(started))
